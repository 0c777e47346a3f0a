"""The work of a grid's passes, without any program."""

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._blocks import RECOMPUTE, Phase
from perfmodel.prediction._grid import LayoutGrid
from perfmodel.prediction._step_model import StepModel
from perfmodel.schedule import get_schedule


def pass_work_s(fixed: StepModel, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes"]:
    """Seconds that the passes of a step keep a rank's compute stream busy at least, mean over pipeline ranks.

    All blocks' phases times the micro-batches, over the ranks: what layers recompute beside the mode, the optimizer
    and completed transfers come on top. 0 for schedules whose passes may overlap, or join or slice micro-batches.
    """
    layouts = [grid.degrees.replace(**shard._asdict()) for shard in grid.shards]
    training = fixed.job.mode == "train"
    phases = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT] if training else [Phase.FORWARD]
    work_s = np.zeros((len(layouts), len(grid.recomputes)))
    for s, layout in enumerate(layouts):
        table = fixed.table(layout)
        by_phase = np.array(table.repeats) @ table.phase_s
        for r, choice in enumerate(grid.recomputes):
            again = by_phase[RECOMPUTE[choice.recompute]] if training and choice.recompute in RECOMPUTE else 0.0
            work_s[s, r] = by_phase[phases].sum() + again
    plain = np.array([get_schedule(choice.schedule).plain for choice in grid.pipelines], float)
    per_rank = fixed.job.num_microbatches(grid.degrees) / grid.degrees.pp
    return plain[:, None, None] * work_s * per_rank * np.prod(fixed.step_factors(grid.degrees))
