"""Step costs beyond single events: stragglers, overhead, and passes slowed by overlapped
communication.

Reductions and gathers of model states run on streams of their own, but their kernels hold
multiprocessors that passes then lack. Their cost is a share of their time, added to the passes that
they overlap with.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._communication import summed
from perfmodel.prediction._problem import Setting, StepProblem, session_cached
from perfmodel.prediction.overlap import CHANNELS_OF_STATES, collective_sm_share
from perfmodel.prediction.sites.known_runs import Coordinates, coordinates
from perfmodel.program import WHOLE, Kind, ProgramSpec, Structure, is_of_kind
from perfmodel.spec import Layout
from perfmodel.workload import parameter_count

_NEXT = {
    Kind.GRAD_REDUCE: ((Kind.BACKWARD, Kind.BACKWARD_WEIGHT), -1),
    Kind.PARAM_GATHER: ((Kind.FORWARD,), -1),
    Kind.PARAM_GATHER_BACKWARD: ((Kind.BACKWARD, Kind.BACKWARD_INPUT), 1),
}
"""Passes that overlap with a reduction or gather, and their segment: a segment's gradients are
reduced while those of the previous segment are computed, and its weights are gathered while the
segment that runs before it computes."""


class Overlap(NamedTuple):
    """Overlapped reductions and gathers of a program, and the passes that they overlap with."""

    comm: Int[np.ndarray, " pairs"]
    """Class of a reduction or gather."""
    place: Int[np.ndarray, " pairs"]
    """Index in `slowed` of a class of passes that overlaps with it."""
    share: Float[np.ndarray, " pairs"]
    """Occurrences of the reduction or gather per occurrence of the passes."""
    slowed: Int[np.ndarray, " slowed"]
    """Classes of passes that overlap with a reduction or gather, each once."""


def overlap_of_passes(spec: ProgramSpec, structure: Structure) -> Overlap:
    """Find the reductions and gathers that overlap with passes, and these passes."""
    # Only what the program overlaps with passes.
    serial = spec.param_gather == "layer_serial"
    kinds = [Kind.GRAD_REDUCE] if spec.grad_reduce in ("overlap", "eager_opt") else []
    if spec.param_gather in ("step_overlap", "layer"):
        kinds += [Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD]
    kind, stage, segment = structure.class_kind, structure.class_stage, structure.class_segment
    occurrences = np.bincount(structure.duration, minlength=structure.n_classes)

    # In a pipeline only the first stage counts. All stages launch their exchanges at once
    # (Megatron-LM's `align_grad_reduce` and `align_param_gather`), so that these delay a step once,
    # and the first stage begins and ends the step. Otherwise they would delay the stages of the
    # last backward one after another, by more than without overlap. Communication for a whole chunk
    # comes before or after all passes of the chunk, and overlaps with none.
    comms: list[int] = []
    passes_beside: list[int] = []
    shares: list[float] = []
    for comm in np.flatnonzero(
        is_of_kind(kind, kinds) & (segment != WHOLE) & (stage == 0)
    ).tolist():
        passes, step = _NEXT[Kind(kind[comm])]
        # Where gathers are not ahead, a pass waits for its gather, and so for the reduction before
        # that on the stream: the reduction runs beside weight gradients alone.
        if serial:
            passes = tuple(phase for phase in passes if phase == Kind.BACKWARD_WEIGHT)
        neighbour = segment[comm] + step
        is_beside = (
            is_of_kind(kind, passes)
            & (stage == stage[comm])
            & (segment == neighbour)
            & (neighbour >= 0)
        )
        overlapping = np.flatnonzero(is_beside).tolist()
        if not overlapping:
            continue
        comms += [comm] * len(overlapping)
        passes_beside += overlapping
        shares += [float(occurrences[comm] / occurrences[overlapping].sum())] * len(overlapping)
    slowed, place = np.unique(np.array(passes_beside, int), return_inverse=True)
    return Overlap(np.array(comms, int), place, np.array(shares), slowed)


def slowed_s(
    durations: Float[np.ndarray, "*lanes classes"], loss: float, overlap: Overlap
) -> Float[np.ndarray, "*lanes slowed"]:
    """Seconds by which the passes of `overlap.slowed` become longer.

    Args:
        durations: seconds of every class, passes as they are alone.
        loss: share of the time of communication by which passes beside it run longer
            (`overlap_loss`).
    """
    xp = durations.__array_namespace__()
    overlapped_s = summed(
        overlap.place, overlap.share * durations[..., overlap.comm], len(overlap.slowed)
    )
    # A pass of length t is slowed for no longer than it runs: x = t + loss x, or x = t / (1 -
    # loss).
    most_s = durations[..., overlap.slowed] / max(1 - loss, 1e-300)
    return loss * xp.minimum(overlapped_s, most_s)


def with_step_costs(
    durations: Float[np.ndarray, "lanes classes"],
    overhead_s: float,
    loss: float,
    scale: Float[np.ndarray, "lanes #classes"],
    optimizer: Int[np.ndarray, " some"],
    overlap: Overlap,
) -> Float[np.ndarray, "lanes classes"]:
    """Add all costs of a real step to durations.

    Communication beside passes slows them (`slowed_s`), everything takes `scale` times as long, and
    the step's overhead is added to the optimizer's step.

    Args:
        durations: seconds of every class, passes as they are alone.
        scale: factors of stragglers and of what like runs showed.
        optimizer: classes of the optimizer's steps.
    """
    lengthened_s = durations * scale
    if len(overlap.slowed):
        longer_s = durations[:, overlap.slowed] + slowed_s(durations, loss, overlap)
        lengthened_s = _replaced(
            lengthened_s,
            overlap.slowed,
            longer_s * (scale if scale.shape[1] == 1 else scale[:, overlap.slowed]),
        )
    return _replaced(lengthened_s, optimizer, lengthened_s[:, optimizer] + overhead_s)


def _replaced(
    seconds: Float[Any, "lanes classes"], classes: Int[np.ndarray, " replaced"], values: Any
) -> Float[Any, "lanes classes"]:
    """Replace the values of some classes, in place if the array is writable (JAX arrays are
    not)."""
    if seconds.__array_namespace__() is not np:
        return seconds.at[:, classes].set(values)
    seconds[:, classes] = values
    return seconds


def overlap_loss(problem: StepProblem) -> float:
    """Slowdown of passes, as a share of the time of overlapped reductions and gathers."""
    channels_share = collective_sm_share(
        problem.cluster.device, problem.framework, CHANNELS_OF_STATES
    )
    return min(1.0, problem.adjusted_framework.communication.dp_overlap_loss + channels_share)


def has_whole_step_costs(problem: StepProblem) -> bool:
    """Whether the whole step is longer: by stragglers, overhead or corrections from similar
    runs."""
    return problem.adjusted_framework.costs_steps or bool(
        problem.adjustment and problem.adjustment.runs
    )


def step_factors(problem: StepProblem, layout: Layout) -> tuple[float, float]:
    """Factors on the step time: for stragglers, and from residuals of similar runs."""
    stragglers = similar_runs = 1.0
    communication = problem.adjusted_framework.communication
    if communication.straggling:
        stragglers = communication.slowest_of(layout.devices)
    if problem.adjustment and problem.adjustment.runs:
        coordinates_of_layout = layout_coordinates(problem.setting, layout)
        log_offset = problem.adjustment.runs.mean(np.array([coordinates_of_layout]))[0]
        similar_runs = float(np.exp(log_offset))
    return stragglers, similar_runs


def layout_coordinates(setting: Setting, layout: Layout) -> Coordinates:
    """Coordinates of a layout, by which nearby runs are correlated."""
    return coordinates(_parameter_count(setting), setting.job.seq_len, layout)


@session_cached
def _parameter_count(setting: Setting) -> float:
    return parameter_count(setting.model)
