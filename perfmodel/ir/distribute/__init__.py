"""Transforms that distribute programs; they can be combined."""

from perfmodel.display import shorten_reprs
from perfmodel.ir.distribute._all_ranks import all_ranks
from perfmodel.ir.distribute._checkpoint import checkpoint
from perfmodel.ir.distribute._distribute import (
    Degrees,
    distribute,
    on_one_stream,
    spread_stages,
    staged,
)
from perfmodel.ir.distribute._parallel import (
    data_parallel,
    expert_parallel,
    megatron_axes,
    pad_vocabulary,
    tensor_parallel,
)
from perfmodel.ir.distribute._passes import default_stages, passes_of
from perfmodel.ir.distribute._pipeline import micro_batches, pipeline
from perfmodel.ir.distribute._sequence import sequence_slices
from perfmodel.ir.distribute._spread import Plan, spread

shorten_reprs(__name__)
