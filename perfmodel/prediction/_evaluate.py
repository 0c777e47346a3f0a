"""Evaluate: step times of layouts from their durations, with the gradient for one and by the thousand."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._compose import Bundle, bundles, weighted_programs
from perfmodel.prediction._durations import durations
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import WeightedDurations, prepared, rank_busy_s
from perfmodel.program import ProgramSpec, Structure
from perfmodel.session import current_session
from perfmodel.spec import Layout
from perfmodel.timeline import ProgramBatch, makespan, makespan_and_grad, makespan_many

PART_OPS: Final = 1_500_000
"""Ops of programs that are evaluated in one call: some 20 ms of loops."""


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Step time of many layouts, in the caller's order."""

    step_time_s: Float[np.ndarray, " layouts"]


def evaluate(problem: StepProblem, layouts: Sequence[Layout]) -> BatchResult:
    """Step time of every layout by full evaluation of its schedule (float32)."""
    found = bundles(problem, layouts)
    programs = [(bundle, one, weight) for bundle in found for one, weight in weighted_programs(bundle)]
    specs = tuple(one.spec for _, one, _ in programs)
    batches = current_session().batches.once(specs, lambda: _batches(specs))
    time_s = np.zeros(len(layouts))
    of_streams: dict[int, list[WeightedDurations]] = {}
    of_programs, spans, at = [], [], 0
    with ThreadPoolExecutor(1) as loops:  # one part's loops run while the next one's durations are composed
        for batch in batches:
            part = programs[at : at + len(batch.programs)]
            of_programs += (of_part := [durations(problem, one) for _, one, _ in part])
            spans.append(loops.submit(makespan_many, batch, of_part))
            at += len(part)
        # waited for here: an interrupt while an executor joins its thread would leave that running
        spans_s = [one_s for span in spans for one_s in span.result()]
    for (bundle, one, weight), of_one, span_s in zip(programs, of_programs, spans_s, strict=True):
        time_s[list(bundle.lanes)] += weight * np.asarray(span_s)
        if bundle.spec.steps > 1:
            of_streams.setdefault(id(bundle), []).append((prepared(one.spec), of_one, weight))
    for bundle in found:
        if id(bundle) in of_streams:
            lanes = list(bundle.lanes)
            time_s[lanes] = np.maximum(time_s[lanes], rank_busy_s(of_streams[id(bundle)]).max(axis=1))
    return BatchResult(time_s)


def _batches(specs: Sequence[ProgramSpec]) -> tuple[ProgramBatch, ...]:
    """Programs joined for evaluation, in parts of about as many ops."""
    programs = [prepared(spec).compiled for spec in specs]
    part = np.cumsum([one.n_ops for one in programs]) // PART_OPS
    bounds = np.flatnonzero(np.diff(part, prepend=-1, append=-1))
    return tuple(ProgramBatch(tuple(programs[first:end])) for first, end in pairwise(bounds.tolist()))


def step_programs(problem: StepProblem, bundle: Bundle, lane: int = 0) -> list[WeightedDurations]:
    """Programs that make up the step of one of a bundle's layouts."""
    return [(prepared(b.spec), durations(problem, b)[lane], weight) for b, weight in weighted_programs(bundle)]


def step_time_s(programs: Sequence[WeightedDurations]) -> float:
    """Step time (float64) of the programs that make up a step."""
    spans_s = sum(weight * float(makespan(prepared.compiled, of_class)) for prepared, of_class, weight in programs)
    return max(spans_s, float(rank_busy_s(programs).max()))


def step_times_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Step time of every layout in float64, one by one (`evaluate` is for thousands)."""
    step_s = np.zeros(len(layouts))
    for bundle in bundles(problem, layouts):
        for at, lane in enumerate(bundle.lanes):
            step_s[lane] = step_time_s(step_programs(problem, bundle, at))
    return step_s


def step_gradients(programs: Sequence[WeightedDurations]) -> tuple[float, list[Float[np.ndarray, " classes"]]]:
    """Step time, and for each of its programs what its makespan follows from by its own classes (of a step that its
    busiest rank sets, that rank's time)."""
    step_s, gradients = 0.0, []
    for program, of_class, weight in programs:
        span, gradient = makespan_and_grad(program.compiled, of_class)
        step_s += weight * float(span)
        gradients.append(np.asarray(gradient, float))
    busy_s = rank_busy_s(programs)
    if busy_s.max() > step_s * (1 + 1e-12):
        return float(busy_s.max()), [program.rank_count[busy_s.argmax()] for program, *_ in programs]
    return step_s, gradients


def per_step(
    programs: Sequence[WeightedDurations],
) -> tuple[float, Float[np.ndarray, " classes"], Float[np.ndarray, " classes"]]:
    """Step time, its gradient, and the occurrences of each class on compute streams; classes of the first program."""
    step_s, gradients = step_gradients(programs)
    classes = {key: i for i, key in enumerate(_class_keys(programs[0][0].structure))}
    of_step, count = np.zeros((2, len(classes)))
    for (program, _, weight), gradient in zip(programs, gradients, strict=True):
        index = [classes[key] for key in _class_keys(program.structure)]
        of_step += weight * np.bincount(index, gradient, len(classes))
        count += weight * np.bincount(index, program.compute_count, len(classes))
    return step_s, of_step, count


def _class_keys(structure: Structure) -> list[tuple[int, ...]]:
    variants = structure.variants[structure.class_variant].T
    columns = (structure.class_kind, structure.class_stage, structure.class_segment, *variants)
    return list(zip(*(column.tolist() for column in columns), strict=True))
