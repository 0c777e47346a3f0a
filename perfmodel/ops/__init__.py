"""Families of kernels, one module each, with shape, work, physics, table columns and
measurement."""

from types import MappingProxyType
from typing import Final

from perfmodel.display import shorten_reprs
from perfmodel.ops._attention import ATTENTION, ATTENTION_MASKS, LATENT_DECODE, Attention
from perfmodel.ops._conv import CONVOLUTION, Convolution
from perfmodel.ops._embedding import EMBEDDING, Embedding
from perfmodel.ops._gemm import GEMM, Gemm
from perfmodel.ops._memory import MEASURED_MEMORY_OPS, MEMORY, MemoryBound
from perfmodel.ops._moe import MOE, NONGATED_MOE, MoE
from perfmodel.ops._op import (
    NUMBERS,
    Axis,
    Collective,
    CollectiveKind,
    Exchange,
    ExchangeWay,
    Family,
    GradientProducts,
    KernelKind,
    KernelOp,
    KindColumns,
    Measurement,
    Pass,
    Shape,
    ShapeColumn,
    Work,
    family_with_bmm,
)
from perfmodel.ops._optimizer import OPTIMIZER, OptimizerStep
from perfmodel.ops._recurrence import RECURRENCE, Recurrence
from perfmodel.ops.physics import Physics

FAMILIES: Final = MappingProxyType(
    {
        family.name: family
        for family in (
            GEMM,
            ATTENTION,
            MEMORY,
            EMBEDDING,
            OPTIMIZER,
            CONVOLUTION,
            MOE,
            RECURRENCE,
        )
    }
)
"""All kernel families by name. To add one, write its module and list it here."""

Op = KernelOp | Collective
"""One event: a kernel or a collective, independent of model, layout and device."""

shorten_reprs(__name__)
