"""Training one regressor: deterministic batches, cosine schedule, early stopping, checkpoints."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Float32, Float64

from perfmodel.cost.learn.parameters import (
    Inputs,
    Parameters,
    base_time,
    feature_matrix,
    join_floor,
    standardise,
)
from perfmodel.cost.learn.rows import KindCode, machine_of, one_hot, shape_with_flags
from perfmodel.cost.learn.training._base import Base
from perfmodel.cost.learn.training._network import (
    Residual,
    Run,
    load_run,
    member,
    save_run,
    stack_members,
)
from perfmodel.cost.learn.training._recipe import Recipe, StepReport
from perfmodel.cost.learn.training._tables import Samples
from perfmodel.ops import FAMILIES

_CHECKS: Final = 40
"""Checks of a training that does not stop early."""
_MOST_CHECKED: Final = 16384
"""Samples of a check, at most."""


class Design(NamedTuple):
    """All samples as arrays ready for gradient steps."""

    z: Any
    """Standardised features, float32 [n, F]."""
    positions: Any
    """Table positions, float32 [n, A]."""
    stack: Any
    """Index of every sample's stack, int32 [n]."""
    log_base: Any
    """Log base time, float32 [n]."""
    log_floor: Any
    """Log of the launch floor, float32 [n]."""
    log_time: Any
    """The measured target, float32 [n]."""


def build_design(
    samples: Samples, base: Base, code: KindCode, fit_on: np.ndarray
) -> tuple[Design, Parameters]:
    """Features of all samples, and parameters whose scaling and ranges come from `fit_on` only."""
    family = samples.rows.family
    machine = machine_of([s.figures for s in samples.stacks], samples.stack, samples.dtypes)
    inputs = Inputs(
        shape_with_flags(samples.rows),
        machine,
        one_hot(code, samples.rows),
        samples.stack,
        base.index,
    )
    physics, raw, positions = feature_matrix(np, family, inputs)

    # Scaling and ranges come from the fitted rows alone: left-out rows must look new.
    fitted_rows = raw[fit_on]
    scale = fitted_rows.std(axis=0)
    low, high = _ranges(positions[fit_on], samples.stack[fit_on], len(samples.stacks))
    frozen = Parameters(
        log_fixed_s=base.log_fixed_s,
        log_compute=base.log_compute,
        log_memory=base.log_memory,
        log_floor_s=base.log_floor_s,
        mean=fitted_rows.mean(axis=0),
        scale=np.where(scale > 1e-6, scale, 1.0),
        low=fitted_rows.min(axis=0),
        high=fitted_rows.max(axis=0),
        kernels=(),
        biases=(),
        stack_embedding=np.zeros((0, 0)),
        tables=tuple(np.zeros((0, 0, 0)) for _ in FAMILIES[family].axes),
        table_low=low,
        table_high=high,
    )
    log_base = np.log(base_time(np, frozen, physics, machine, base.index))
    design = Design(
        z=standardise(np, frozen, raw).astype(np.float32),
        positions=positions.astype(np.float32),
        stack=samples.stack.astype(np.int32),
        log_base=log_base.astype(np.float32),
        log_floor=base.log_floor_s[base.index].astype(np.float32),
        log_time=np.log(samples.time_s).astype(np.float32),
    )
    return design, frozen


def _ranges(positions: np.ndarray, stack: np.ndarray, stacks: int) -> tuple[np.ndarray, np.ndarray]:
    """Range of the positions in which every stack was measured; that of all for stacks without
    samples."""
    low = np.tile(positions.min(axis=0), (stacks, 1))
    high = np.tile(positions.max(axis=0), (stacks, 1))
    for s in np.unique(stack):
        stack_positions = positions[stack == s]
        low[s], high[s] = stack_positions.min(axis=0), stack_positions.max(axis=0)
    return low, high


def sampling_weights(
    base: Base, rows: np.ndarray, stack: np.ndarray, cap: int
) -> Float64[np.ndarray, "n"]:
    """Probability that each of `rows` is drawn: groups count as rows^0.75, so that small groups
    also matter."""
    # probabilities of rows, so that a group's own is its rows to the power of 0.75: each row's to
    # that of -0.25
    group = base.index[rows]
    per_group = np.bincount(group, minlength=len(base.groups)).astype(float)
    per_stack = np.bincount(stack[rows]).astype(float)
    weight = np.maximum(per_group, 1.0)[group] ** -0.25
    # and no stack counts for more than `cap` rows, or one dense sweep would decide for all devices
    weight *= (np.minimum(per_stack, cap) / np.maximum(per_stack, 1.0))[stack[rows]]
    return weight / weight.sum()


@dataclass(frozen=True, eq=False)
class Training:
    """Data, method and duration of the fit of a regressor's networks.

    Equal fields give equal results on one machine, whether a run was resumed or not.
    """

    samples: Samples
    base: Base
    """The physics that the network corrects."""
    code: KindCode
    recipe: Recipe
    fit_on: np.ndarray
    """Samples that gradient steps see, int64[n]."""
    check_on: np.ndarray | None = None
    """Samples by which the best weights are chosen and the training stops early; None or empty: it
    runs to its end."""
    steps: int | None = None
    """Length of the learning-rate schedule; the recipe's by default."""
    start: Parameters | None = None
    """Weights from which training continues, at a third of the learning rate."""
    seed: int = 0
    """Seed of the initial weights and of the order of batches; member i of a recipe uses seed +
    i."""
    report: StepReport | None = None
    checkpoint: Path | None = None
    """A file that is written now and then, and resumed from if it is of this very run."""

    @property
    def n_steps(self) -> int:
        """Gradient steps, unless the training stops early."""
        return self.steps or self.recipe.steps

    def of_member(self, index: int) -> "Training":
        """Return the training of one member of an ensemble, with a separate seed and checkpoint."""
        return replace(
            self,
            start=None if self.start is None else member(self.start, index),
            seed=self.seed + index,
            report=_report_of_member(self.report, index, self.recipe.members),
            checkpoint=_member_checkpoint(self.checkpoint, index),
        )


def train_members(training: Training) -> Parameters:
    """Fit one network for every member of a recipe, and stack them.

    Members differ in their random start and in the order of their batches.
    """
    members = [train(training.of_member(index)) for index in range(training.recipe.members)]
    return members[0] if len(members) == 1 else stack_members(members)


def train(training: Training) -> Parameters:
    """Fit one network; returns parameters with NumPy arrays."""
    samples, recipe, steps = training.samples, training.recipe, training.n_steps
    design, frozen = build_design(samples, training.base, training.code, training.fit_on)
    rngs = nnx.Rngs(training.seed)
    model = Residual(samples.rows.family, design.z.shape[1], len(samples.stacks), recipe, rngs=rngs)
    peak_rate = recipe.learning_rate
    if training.start is not None:
        model.start_from(training.start)
        # A network that goes on from earlier weights learns at a third of the rate.
        peak_rate *= 1.0 / 3.0
    rates = learning_rates(peak_rate, steps)
    graph, state = nnx.split(model)
    form = samples.rows.family, graph, recipe.weight_decay
    device_frozen = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), frozen)
    moments = _optimiser(recipe.weight_decay).init(state)

    # A run is known by all that it follows from, so that a checkpoint of another one is never
    # resumed.
    origin = repr((recipe, training.seed, steps, len(training.fit_on)))
    run = Run(zlib.crc32(design.log_time.tobytes() + origin.encode()))
    best = state
    if training.checkpoint is not None:
        saved = load_run(training.checkpoint, run.identity, (state, moments, best))
        if saved is not None:
            run, (state, moments, best) = saved

    per_check = max(1, steps // _CHECKS)
    checked = None
    if training.check_on is not None and len(training.check_on):
        checked = _rows(design, training.check_on[:_MOST_CHECKED])
    for step, batch in enumerate(_batches(training, design, run.done, per_check), run.done):
        state, moments = _step(form, device_frozen, rates[step], state, moments, batch)
        done = step + 1
        if done % per_check and done < steps:
            continue

        # At a check, keep the weights that predict left-out rows best; stop when no weights have
        # improved for long.
        if checked is not None:
            error = float(_error(form, device_frozen, state, checked))
        else:
            error = float("nan")
        gained = checked is None or error < run.best_error
        run = run.after(done, error, gained)
        if gained:
            best = state
        if training.report is not None:
            training.report(done, steps, error)
        if training.checkpoint is not None:
            save_run(training.checkpoint, run, (state, moments, best))
        if run.waited >= recipe.patience:
            break
    return jax.tree.map(np.asarray, nnx.merge(graph, best).arrays(frozen))


def _batches(
    training: Training, design: Design, first_step: int, per_check: int
) -> Iterator[Design]:
    """The samples of every step from `first_step` on.

    They are drawn for all steps between two checks with the check's own seed, so that a run resumed
    at a check draws the same batches.
    """
    recipe, fit_on = training.recipe, training.fit_on
    probability = sampling_weights(
        training.base, fit_on, training.samples.stack, recipe.rows_per_stack
    )
    size = min(recipe.batch, max(8, len(fit_on)))
    order = fit_on
    for step in range(first_step, training.n_steps):
        since_check = step % per_check
        if since_check == 0 or step == first_step:
            generator = np.random.default_rng([training.seed, step - since_check])
            order = generator.choice(fit_on, per_check * size, p=probability)
        yield _rows(design, order[since_check * size : (since_check + 1) * size])


def learning_rates(peak: float, steps: int) -> Float32[np.ndarray, " steps"]:
    """Learning rate of every step: rising over the first fortieth, then falling by half a cosine to
    1e-5 (SGDR, arXiv 1608.03983, equation 5, without restarts)."""
    step = np.arange(steps)
    rising = max(1, steps // 40)
    fallen_share = np.clip((step - rising) / max(1, steps - rising), 0, 1)
    falling = 0.5 * (1 + np.cos(np.pi * fallen_share))
    rates = np.where(step < rising, peak * step / rising, 1e-5 + (peak - 1e-5) * falling)
    return rates.astype(np.float32)


StaticArgs = tuple[str, Any, float]
"""Family, graph of the network and weight decay: with the arrays' shapes all that a compiled step
depends on, so that all trainings of a regressor share one."""


def _optimiser(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its learning rate, on clipped gradients."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(weight_decay),
    )


def _log_times(form: StaticArgs, frozen: Parameters, state: Any, batch: Design) -> Any:
    """Log times as they are measured: with the launch floor where the host's launch was timed,
    too."""
    family, graph, _ = form
    kernel = batch.log_base + nnx.merge(graph, state)(
        family, frozen, batch.z, batch.positions, batch.stack
    )
    return join_floor(jnp, kernel, batch.log_floor)


@partial(jax.jit, static_argnums=0)
def _step(
    form: StaticArgs, frozen: Parameters, rate: Any, state: Any, moments: Any, batch: Design
) -> tuple[Any, Any]:
    """Weights and moments after one more batch."""

    def loss(state: Any) -> Any:
        return jnp.mean(percentage_loss(_log_times(form, frozen, state, batch) - batch.log_time))

    # The optimiser gets its learning rate as an argument, because the rate changes from step to
    # step and the compiled program must not.
    updates, moments = _optimiser(form[2]).update(jax.grad(loss)(state), moments, state)
    return optax.apply_updates(state, jax.tree.map(lambda u: -rate * u, updates)), moments


@partial(jax.jit, static_argnums=0)
def _error(form: StaticArgs, frozen: Parameters, state: Any, batch: Design) -> Any:
    """Mean absolute error of log times."""
    return jnp.mean(jnp.abs(_log_times(form, frozen, state, batch) - batch.log_time))


def _report_of_member(report: StepReport | None, index: int, members: int) -> StepReport | None:
    """Progress of one member as part of that of all."""
    if report is None:
        return None
    return lambda now, steps, error: report(index * steps + now, members * steps, error)


def _member_checkpoint(checkpoint: Path | None, index: int) -> Path | None:
    """Checkpoint file of one member; the first has the name that a single network has."""
    if checkpoint is None or index == 0:
        return checkpoint
    return checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt.npz')}.{index}.ckpt.npz")


def percentage_loss(error: Any) -> Any:
    """Smooth version of |predicted / true - 1| for log errors, so that training minimises the
    figure that is reported.

    Linear beyond a factor e either way, so that a bad start does not blow up.
    """
    inner = jnp.expm1(jnp.clip(error, -1.0, 1.0))
    outer = jnp.maximum(jnp.abs(error) - 1.0, 0.0)
    # smooth at 0, where the absolute value has a kink
    return jnp.sqrt(inner * inner + 1e-4) + outer


def _rows(design: Design, index: np.ndarray) -> Design:
    """The samples at `index`."""
    return Design(*(column[index] for column in design))
