"""What a step takes beyond its events: stragglers, time that overlapped communication costs the passes beside it."""

from itertools import product

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import WHOLE, Kind, ProgramSpec, Structure
from perfmodel.spec import Framework

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def beside_passes(spec: ProgramSpec, structure: Structure) -> Int[np.ndarray, "pairs 2"]:
    """(class of an overlapped reduction or gather, class of the passes of the same segment) of a program."""
    hidden: dict[Kind, tuple[Kind, ...]] = {}
    if spec.grad_reduce in ("overlap", "eager_opt"):
        hidden[Kind.GRAD_REDUCE] = _BACKWARD
    if spec.param_gather in ("step_overlap", "layer"):
        hidden |= {Kind.PARAM_GATHER: (Kind.FORWARD,), Kind.PARAM_GATHER_BACKWARD: _BACKWARD}
    every_pass = spec.gathers_by_layer or spec.reduce_every_micro_batch
    kind, stage, segment = structure.class_kind, structure.class_stage, structure.class_segment
    pairs = [
        pair
        for comm, passes in hidden.items()
        for pair in product(np.flatnonzero(kind == comm).tolist(), np.flatnonzero(np.isin(kind, passes)).tolist())
        if stage[pair[0]] == stage[pair[1]]
        and segment[pair[0]] == segment[pair[1]]
        # a whole pass is also that of the micro-batches with no communication beside them
        and (every_pass or segment[pair[0]] != WHOLE)
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)


def with_step_costs(
    durations: Float[np.ndarray, "lanes classes"],
    framework: Framework,
    scale: Float[np.ndarray, " lanes"],
    structure: Structure,
    pairs: Int[np.ndarray, "pairs 2"],
) -> Float[np.ndarray, "lanes classes"]:
    """Durations as a real step has them: all `scale` times as long; the step's overhead rides with its optimizer."""
    comm, passes = pairs.T
    out = durations.copy()
    np.add.at(out.T, passes, framework.dp_overlap_loss * durations.T[comm])
    out *= scale[:, None]
    out[:, structure.class_kind == Kind.OPTIMIZER] += framework.step_overhead_s
    return out
