"""Frozen records of devices, clusters, models, frameworks, layouts and jobs. No JAX, no I/O.

A `Problem` is a `Job` of a `Model` on a `Cluster` of `Device`s by a `Framework`; a `Layout` is one
answer to it.

Seven modules are doors of their own: `parts` of a transformer, `unet`, `encoders`, `sample_units`,
`framework_facts`, `notation` (how values and layouts are written, `tp=8,pp=16,dp=8`) and `keywords`
(types of the keyword arguments that stand for a record's fields).
"""

from perfmodel.display import shorten_reprs
from perfmodel.spec._cluster import (
    BACKENDS,
    USUAL_DTYPES,
    Cluster,
    Device,
    NetworkLevel,
    PeakRates,
    interleaved_groups,
)
from perfmodel.spec._conv_net import ConvLayer, ConvNet
from perfmodel.spec._dimensions import BLOCK_KEYS, DEVICE_KEYS, DIMENSIONS
from perfmodel.spec._documented import Stated, documented
from perfmodel.spec._framework import Framework
from perfmodel.spec._job import OPTIMIZERS, Job
from perfmodel.spec._job_sections import (
    BASE_WEIGHT_BYTES,
    AdapterModule,
    CudaGraphs,
    Dispatcher,
    EagerKernel,
    Fp8Recipe,
    RecomputeModule,
    RowKernels,
    WideModule,
)
from perfmodel.spec._layout import ContextParallel, Layout, Recompute, StateOffload
from perfmodel.spec._model import Mlp, Model, Transformer
from perfmodel.spec._problem import Problem
from perfmodel.spec._sections import Sectioned, flat_location, key_fields, nested
from perfmodel.spec.framework_facts import AttentionKernel, partition_by_cost

# Records that another one holds are shown inside it, by whichever door they come.
for _module in (
    "_dimensions",
    "_job",
    "_job_sections",
    "_layout",
    "_model_sections",
    "encoders",
    "framework_facts",
    "parts",
    "unet",
):
    shorten_reprs(f"{__name__}.{_module}")
shorten_reprs(__name__)
