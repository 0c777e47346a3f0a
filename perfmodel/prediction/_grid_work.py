"""The work of a grid's passes, without any program."""

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._phases import PASSED, Phase, modes_of, recompute_s
from perfmodel.prediction._price import block_times, step_factors
from perfmodel.prediction._problem import StepProblem
from perfmodel.schedule import get_schedule


def pass_work_s(problem: StepProblem, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes"]:
    """Seconds that the passes of a step keep a rank's compute stream busy at least, mean over pipeline ranks.

    All blocks' phases times the micro-batches, over the ranks: what layers recompute beside the mode, the optimizer
    and completed transfers come on top. 0 for schedules whose passes may overlap, or join or slice micro-batches.
    """
    layouts = [grid.degrees.replace(**shard._asdict()) for shard in grid.shards]
    training = problem.job.mode == "train"
    phases = PASSED if training else [Phase.FORWARD]
    by_phase_s = np.array(
        [np.array(table.repeats) @ table.phase_s for table in (block_times(problem, lay) for lay in layouts)]
    )
    work_s = np.repeat(by_phase_s[:, phases].sum(axis=1)[:, None], len(grid.recomputes), axis=1)
    if training:
        work_s += recompute_s(by_phase_s[:, None], modes_of([choice.recompute for choice in grid.recomputes]))
    plain = np.array([get_schedule(choice.schedule).plain for choice in grid.pipelines], float)
    per_rank = problem.job.num_microbatches(grid.degrees) / grid.degrees.pp
    return plain[:, None, None] * work_s * per_rank * np.prod(step_factors(problem, grid.degrees))
