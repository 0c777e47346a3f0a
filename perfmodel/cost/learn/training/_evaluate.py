"""Held-out errors: shapes, large shapes and whole devices."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from perfmodel.cost.learn._queries import PriceQuery, Query
from perfmodel.cost.learn._regressor import Regressor
from perfmodel.cost.learn.intervals import (
    Intervals,
    Quantiles,
    bucketed,
    conformal,
    figures_of_errors,
    in_range_intervals,
    summary,
)
from perfmodel.cost.learn.parameters import Parameters
from perfmodel.cost.learn.rows import KindCode
from perfmodel.cost.learn.training._base import fit_base, groups_of_samples
from perfmodel.cost.learn.training._recipe import Recipe, Stages
from perfmodel.cost.learn.training._tables import Samples, split
from perfmodel.cost.learn.training._train import Training, train_members
from perfmodel.ops import KernelKind

FEWEST_OF_DEVICE: Final = 200
"""Least number of samples at which a device is left out for evaluation."""
MOST_DEVICES: Final = 4
"""Devices left out in turn where a recipe names none."""
LARGE_SHARE: Final = 0.10
"""Share of a stack's largest kernels (by FLOPs) that the large-left-out refit does not see."""
_TYPICAL: Final = {"near": 0.2, "far": 0.5, "beyond": 0.2}
"""Half-widths (log) used where a family has too few devices or sizes to measure them."""


@dataclass(frozen=True)
class Evaluation:
    """Errors and intervals of a recipe."""

    intervals: Intervals
    record: dict[str, Any]
    params: Parameters
    """Trained without the kept-out shapes."""


def evaluate(
    samples: Samples, recipe: Recipe, code: KindCode, *, seed: int, stages: Stages
) -> Evaluation:
    """Train with held-out parts, and return intervals and model-card figures."""
    trials = Trials(samples, recipe, code, seed, stages)

    # Whole shapes kept out: errors and intervals inside the range of what was measured.
    fit_on, check_on, test = split(samples, recipe.holdout)
    too_few = len(fit_on) < 10 or len(test) < 5
    if too_few:
        fit_on = np.arange(len(samples))
        check_on = np.zeros(0, np.int64)
        test = np.zeros(0, np.int64)
    shapes = trials.fit("shapes out", "shapes", fit_on, check_on)
    error, log_time = log_errors(shapes, samples, test)
    pairs, group = groups_of_samples(samples)
    group = group[test]
    # by stack and kind, where there are errors enough
    known, family = (
        in_range_intervals(error, log_time, group) if len(test) else ({}, _typical("near"))
    )
    groups = {pairs[code]: quantiles for code, quantiles in known.items()}
    record: dict[str, Any] = {"in_range": summary(samples, test, error)}
    in_range = Intervals(groups, family, family, family, family)
    record["in_range"]["coverage_90"] = cross_coverage(
        error, log_time, group, samples.shape_key[test]
    )

    # The largest kernels, then devices kept out: intervals outside of that range.
    beyond, record["large_left_out"] = _largest_shapes(trials)
    near_devices, far_devices, record["device_left_out"] = _devices(trials)
    intervals = replace(in_range, near=near_devices, far=far_devices, beyond=beyond)
    return Evaluation(intervals, record, shapes.params)


@dataclass(frozen=True, eq=False)
class Trials:
    """Shared inputs of all trainings of one recipe."""

    samples: Samples
    recipe: Recipe
    code: KindCode
    """Vocabulary of all samples, also of those that a training does not see."""
    seed: int
    stages: Stages

    def without(self, title: str, file: str, left_out: np.ndarray) -> Regressor:
        """Train a regressor without the samples `left_out` (bool[n])."""
        steps = self.recipe.left_out_steps
        return self.fit(title, file, np.flatnonzero(~left_out), np.zeros(0, np.int64), steps)

    def fit(
        self,
        title: str,
        file: str,
        fit_on: np.ndarray,
        check_on: np.ndarray,
        steps: int | None = None,
    ) -> Regressor:
        """A regressor that has seen only `fit_on`, and was stopped by `check_on`; without intervals
        or record."""
        samples, recipe = self.samples, self.recipe
        used_rows = np.concatenate([fit_on, check_on]).astype(np.int64)
        part = samples.take(used_rows)

        # Stacks as if the rest had never been measured: plans must not rest on kinds that were left
        # out.
        kinds: list[dict[KernelKind, int]] = [{} for _ in samples.stacks]
        for (stack, kind), count in Counter(
            zip(part.stack.tolist(), part.rows.kind.tolist(), strict=True)
        ).items():
            kinds[stack][part.rows.kinds[kind]] = count
        stacks = tuple(replace(s, kinds=k) for s, k in zip(samples.stacks, kinds, strict=True))
        base = fit_base(part, self.seed)
        training = Training(
            part,
            base,
            self.code,
            recipe,
            fit_on=np.arange(len(fit_on)),
            check_on=np.arange(len(fit_on), len(used_rows)),
            steps=steps,
            seed=self.seed,
            report=self.stages.report(title),
            checkpoint=self.stages.checkpoint(file),
        )
        params = train_members(training)
        zero = Quantiles((), (0.0,), (0.0,))
        return Regressor(
            name=recipe.name,
            family=recipe.family,
            dtypes=recipe.dtypes,
            params=params,
            stacks=stacks,
            groups=base.groups,
            code=self.code,
            intervals=Intervals({}, zero, zero, zero, zero),
            cells=np.zeros(0, np.uint32),
            record={},
        )


def log_errors(
    regressor: Regressor, samples: Samples, index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log(true / predicted) and predicted log seconds of the samples at `index`."""
    error = np.zeros(len(index))
    log_time = np.zeros(len(index))
    queries = tuple(Query(s.figures, s.source, s.software) for s in samples.stacks)
    # in parts, as the network's inputs take far more memory than the samples
    for start in range(0, len(index), 50_000):
        part = index[start : start + 50_000]
        request = PriceQuery(
            samples.rows.take(part), queries, samples.stack[part], host_launch=True
        )
        predicted = regressor.predict(request)
        error[start : start + 50_000] = np.log(samples.time_s[part]) - predicted.log_time
        log_time[start : start + 50_000] = predicted.log_time
    return error, log_time


def cross_coverage(
    error: np.ndarray, log_time: np.ndarray, group: np.ndarray, keys: np.ndarray
) -> float | None:
    """Share inside intervals calibrated on the other half of the kept-out shapes; None without two
    halves."""
    half = (keys // np.uint64(7)) % np.uint64(2) == 0
    covered = np.zeros(len(error), bool)
    # intervals of one half of the shapes, judged by the other, both ways: no shape judges itself
    for held_out in (half, ~half):
        if not held_out.any() or held_out.all():
            return None
        groups, family = in_range_intervals(error[held_out], log_time[held_out], group[held_out])
        fitted = ~held_out
        for code in np.unique(group[fitted]).tolist():
            in_group = fitted & (group == code)
            low, high = groups.get(code, family).at(log_time[in_group])
            covered[in_group] = (error[in_group] >= low) & (error[in_group] <= high)
    return round(float(covered.mean()), 4)


def _largest_shapes(trials: Trials) -> tuple[Quantiles, dict[str, Any]]:
    """Errors on the largest kernels of every group, when they were left out."""
    samples = trials.samples
    size = samples.physics()[0].flops
    is_large = np.zeros(len(samples), bool)
    pairs, group = groups_of_samples(samples)
    # Separately for each group, because a large shape of one device or kind may not be large for
    # another.
    for number in range(len(pairs)):
        in_group = group == number
        if in_group.sum() >= FEWEST_OF_DEVICE:
            is_large |= in_group & (size > np.quantile(size[in_group], 1.0 - LARGE_SHARE))
    if is_large.sum() < 50:
        return _typical("beyond"), {"n": 0}
    error, log_time = log_errors(
        trials.without("large out", "large", is_large), samples, np.flatnonzero(is_large)
    )
    return bucketed(error, log_time), figures_of_errors(error)


def _devices(trials: Trials) -> tuple[Quantiles, Quantiles, dict[str, Any]]:
    """Errors on devices left out in turn: of those with near relatives, of others, and by
    device."""
    samples = trials.samples
    names = np.array([s.figures.name for s in samples.stacks], object)[samples.stack]
    counts = {d: int((names == d).sum()) for d in set(names.tolist())}
    largest = sorted(
        (d for d in counts if counts[d] >= FEWEST_OF_DEVICE), key=lambda d: (-counts[d], d)
    )
    chosen = trials.recipe.devices_out or largest[:MOST_DEVICES]
    errors: dict[str, list[np.ndarray]] = {"near": [], "far": []}
    record: dict[str, Any] = {}
    # one device alone has no others to be predicted from
    if len(counts) < 2:
        return _typical("near"), _typical("far"), record
    for device in chosen:
        left_out = names == device
        regressor = trials.without(f"{device} out", f"without-{device}", left_out)
        rng = np.random.default_rng(trials.seed)
        index = np.flatnonzero(left_out)
        # quantiles need no more samples
        index = np.sort(rng.choice(index, min(len(index), 20_000), replace=False))
        error, _ = log_errors(regressor, samples, index)

        # Separately for near and far relatives, because near ones predict better.
        near_errors = _from_near(regressor, samples, index)
        errors["near"].append(error[near_errors])
        errors["far"].append(error[~near_errors])
        relation = "near" if near_errors.mean() > 0.5 else "far"
        record[device] = {"relation": relation, **figures_of_errors(error)}
    return _pooled(errors["near"], "near"), _pooled(errors["far"], "far"), record


def _from_near(regressor: Regressor, samples: Samples, index: np.ndarray) -> np.ndarray:
    """Which samples were answered by a near relative (or by a ratio) rather than from far away."""
    kinds = samples.rows.kinds
    # a plan follows from stack and kind alone: few of them for many samples
    pairs, codes = np.unique(
        samples.stack[index] * len(kinds) + samples.rows.kind[index], return_inverse=True
    )
    near_relatives = []
    for pair in pairs.tolist():
        stack = samples.stacks[pair // len(kinds)]
        kind = kinds[pair % len(kinds)]
        plan = regressor.plan(Query(stack.figures, stack.source, stack.software), kind)
        near_relatives.append(plan.mode != "far")
    return np.array(near_relatives)[codes]


def _pooled(errors: list[np.ndarray], relation: str) -> Quantiles:
    """Bounds of the errors of all devices together; typical ones where they are few."""
    pooled = np.concatenate(errors) if errors else np.zeros(0)
    if len(pooled) < FEWEST_OF_DEVICE:
        return _typical(relation)
    low, high = conformal(pooled)
    return Quantiles((), (low,), (high,))


def _typical(relation: str) -> Quantiles:
    """Bounds where a family has too few devices or sizes to measure them."""
    return Quantiles((), (-_TYPICAL[relation],), (_TYPICAL[relation],))
