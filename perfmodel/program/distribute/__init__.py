"""Distribution as transforms from programs to programs: each may follow the others."""

from perfmodel.display import shorten_reprs
from perfmodel.program.distribute._checkpoint import checkpoint
from perfmodel.program.distribute._distribute import Degrees, distribute, on_one_stream, spread_stages, staged
from perfmodel.program.distribute._parallel import (
    data_parallel,
    expert_parallel,
    megatron_axes,
    pad_vocabulary,
    tensor_parallel,
)
from perfmodel.program.distribute._pipeline import micro_batches, pipeline
from perfmodel.program.distribute._sequence import sequence_slices
from perfmodel.program.distribute._spread import Plan, spread

shorten_reprs(__name__)
