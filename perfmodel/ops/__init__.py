"""Families of kernels, each a module: shape, work, physics, how tables state it and how it is measured."""

from perfmodel.display import shorten_reprs
from perfmodel.ops._attention import ATTENTION_MASKS, LATENT_DECODE, Attention
from perfmodel.ops._conv import Convolution
from perfmodel.ops._embedding import Embedding
from perfmodel.ops._family import Axis, Family, GradientProducts, KernelKind, KindColumns, Measurement, ShapeColumn
from perfmodel.ops._gemm import Gemm
from perfmodel.ops._memory import MEASURED as MEASURED_MEMORY_OPS
from perfmodel.ops._memory import MemoryBound
from perfmodel.ops._moe import NONGATED_MOE, MoE
from perfmodel.ops._op import (
    Collective,
    CollectiveKind,
    Exchange,
    ExchangeWay,
    KernelOp,
    Pass,
    Shape,
    Work,
    family_with_bmm,
)
from perfmodel.ops._optimizer import OptimizerStep
from perfmodel.ops._physics import (
    Machine,
    Physics,
    cached_share,
    common_features,
    compute_seconds,
    memory_seconds,
    vector_rate,
)
from perfmodel.ops._programs import JAX_DTYPES, TORCH_DTYPES, Program, Tensors, torch_module
from perfmodel.ops._recurrence import Recurrence
from perfmodel.ops._registry import FAMILIES

Op = KernelOp | Collective
"""What one event computes or moves, independent of model, layout and device."""

shorten_reprs(__name__)
