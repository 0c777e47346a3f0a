"""Frozen records of devices, clusters, models, frameworks, layouts and jobs. No JAX, no I/O.

A `Problem` is a `Job` of a `Model` on a `Cluster` of `Device`s by a `Framework`; a `Layout` is one answer to it, which
`_notation` reads and writes as `tp=8,pp=16,dp=8`.
"""

from perfmodel.display import shorten_reprs
from perfmodel.spec._cluster import Cluster, NetworkLevel, interleaved_groups
from perfmodel.spec._device import BACKENDS, USUAL_DTYPES, Device, PeakRates
from perfmodel.spec._dimensions import BLOCK_KEYS, DEVICE_KEYS, DIMENSIONS, Dimension
from perfmodel.spec._documented import Stated, documented
from perfmodel.spec._framework import AttentionKernel, Framework
from perfmodel.spec._framework_facts import (
    Capabilities,
    CommunicationCosts,
    Execution,
    HostCosts,
    LaunchDefaults,
    MemoryCosts,
    MemoryCounter,
    ReportedRanks,
)
from perfmodel.spec._job import OPTIMIZERS, Job, Optimizer
from perfmodel.spec._job_sections import (
    BASE_WEIGHT_BYTES,
    AdapterModule,
    CudaGraphs,
    Dispatcher,
    EagerKernel,
    Fp8Recipe,
    RecomputeModule,
    WideModule,
)
from perfmodel.spec._keywords import JobKeywords, LayoutKeywords, StepKeywords, TransformerKeywords
from perfmodel.spec._layout import ContextParallel, Layout, Recompute, StateOffload
from perfmodel.spec._model import ConvLayer, ConvNet, Mlp, Model, Transformer
from perfmodel.spec._notation import (
    SCHEDULE_ALIASES,
    SCHEDULES,
    PerRank,
    PerStage,
    schedule_name,
    written,
    written_values,
)
from perfmodel.spec._parts import (
    AdaLN,
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    NarrowEmbedding,
    Patches,
    SelectiveScan,
    ShortConv,
    Spectrogram,
)
from perfmodel.spec._problem import Problem
from perfmodel.spec._sections import Sectioned, flat_location, key_fields, nested
from perfmodel.spec._stage_partition import partition_by_cost

# Sections are shown inside the records that the door offers.
for _door in (__name__, "perfmodel.spec._job_sections", "perfmodel.spec._model_sections"):
    shorten_reprs(_door)
