"""Frozen descriptions of devices, clusters, models, frameworks, layouts and ops. No JAX, no I/O."""

from perfmodel.display import shorten_reprs
from perfmodel.spec._cluster import Cluster as Cluster
from perfmodel.spec._cluster import NetworkLevel as NetworkLevel
from perfmodel.spec._device import Device as Device
from perfmodel.spec._device import PeakRates as PeakRates
from perfmodel.spec._dimensions import BLOCK_KEYS as BLOCK_KEYS
from perfmodel.spec._dimensions import DEVICE_KEYS as DEVICE_KEYS
from perfmodel.spec._dimensions import DIMENSIONS as DIMENSIONS
from perfmodel.spec._dimensions import Dimension as Dimension
from perfmodel.spec._documented import Stated as Stated
from perfmodel.spec._documented import documented as documented
from perfmodel.spec._framework import AttentionKernel as AttentionKernel
from perfmodel.spec._framework import Execution as Execution
from perfmodel.spec._framework import Framework as Framework
from perfmodel.spec._framework import MemoryCounter as MemoryCounter
from perfmodel.spec._framework import partition_by_cost as partition_by_cost
from perfmodel.spec._layout import USUAL_DTYPES as USUAL_DTYPES
from perfmodel.spec._layout import ContextParallel as ContextParallel
from perfmodel.spec._layout import CudaGraphs as CudaGraphs
from perfmodel.spec._layout import Dispatcher as Dispatcher
from perfmodel.spec._layout import EagerKernel as EagerKernel
from perfmodel.spec._layout import Fp8Recipe as Fp8Recipe
from perfmodel.spec._layout import Job as Job
from perfmodel.spec._layout import Layout as Layout
from perfmodel.spec._layout import Recompute as Recompute
from perfmodel.spec._layout import RecomputeModule as RecomputeModule
from perfmodel.spec._layout import StateOffload as StateOffload
from perfmodel.spec._model import AdaLN as AdaLN
from perfmodel.spec._model import ConvLayer as ConvLayer
from perfmodel.spec._model import ConvNet as ConvNet
from perfmodel.spec._model import DeltaNet as DeltaNet
from perfmodel.spec._model import Experts as Experts
from perfmodel.spec._model import LatentAttention as LatentAttention
from perfmodel.spec._model import Mamba as Mamba
from perfmodel.spec._model import Mlp as Mlp
from perfmodel.spec._model import Model as Model
from perfmodel.spec._model import Patches as Patches
from perfmodel.spec._model import Transformer as Transformer
from perfmodel.spec._notation import SCHEDULE_ALIASES as SCHEDULE_ALIASES
from perfmodel.spec._notation import SCHEDULES as SCHEDULES
from perfmodel.spec._notation import PerRank as PerRank
from perfmodel.spec._notation import PerStage as PerStage
from perfmodel.spec._notation import schedule_name as schedule_name
from perfmodel.spec._notation import written as written
from perfmodel.spec._optimizer import OPTIMIZERS as OPTIMIZERS
from perfmodel.spec._optimizer import Optimizer as Optimizer
from perfmodel.spec._problem import Problem as Problem

shorten_reprs(__name__)
