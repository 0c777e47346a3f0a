"""Frozen descriptions of devices, clusters, models, frameworks, layouts and ops. No JAX, no I/O."""

from perfmodel.display import shorten_reprs
from perfmodel.spec._cluster import Cluster, NetworkLevel
from perfmodel.spec._device import Device, PeakRates
from perfmodel.spec._dimensions import BLOCK_KEYS, DEVICE_KEYS, DIMENSIONS, Dimension
from perfmodel.spec._documented import Stated, documented
from perfmodel.spec._framework import (
    AttentionKernel,
    Execution,
    Framework,
    MemoryCounter,
    ReportedRanks,
    partition_by_cost,
)
from perfmodel.spec._layout import (
    USUAL_DTYPES,
    ContextParallel,
    CudaGraphs,
    Dispatcher,
    EagerKernel,
    Fp8Recipe,
    Job,
    Layout,
    Recompute,
    RecomputeModule,
    StateOffload,
    WideModule,
)
from perfmodel.spec._model import (
    AdaLN,
    ConvLayer,
    ConvNet,
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    Patches,
    Transformer,
)
from perfmodel.spec._notation import SCHEDULE_ALIASES, SCHEDULES, PerRank, PerStage, schedule_name, written
from perfmodel.spec._optimizer import OPTIMIZERS, Optimizer
from perfmodel.spec._problem import Problem

shorten_reprs(__name__)
