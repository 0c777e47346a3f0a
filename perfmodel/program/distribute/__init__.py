"""Distribution as transforms from programs to programs: each may follow the others."""

from perfmodel.display import shorten_reprs
from perfmodel.program.distribute._checkpoint import checkpoint as checkpoint
from perfmodel.program.distribute._distribute import Degrees as Degrees
from perfmodel.program.distribute._distribute import distribute as distribute
from perfmodel.program.distribute._distribute import on_one_stream as on_one_stream
from perfmodel.program.distribute._distribute import spread_stages as spread_stages
from perfmodel.program.distribute._distribute import staged as staged
from perfmodel.program.distribute._parallel import data_parallel as data_parallel
from perfmodel.program.distribute._parallel import expert_parallel as expert_parallel
from perfmodel.program.distribute._parallel import tensor_parallel as tensor_parallel
from perfmodel.program.distribute._pipeline import micro_batches as micro_batches
from perfmodel.program.distribute._pipeline import pipeline as pipeline
from perfmodel.program.distribute._sequence import sequence_slices as sequence_slices
from perfmodel.program.distribute._spread import Plan as Plan
from perfmodel.program.distribute._spread import spread as spread
from perfmodel.program.distribute._weights import megatron_axes as megatron_axes
from perfmodel.program.distribute._weights import pad_vocabulary as pad_vocabulary

shorten_reprs(__name__)
