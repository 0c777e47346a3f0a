"""The families of kernels, by name."""

from types import MappingProxyType
from typing import Final

from perfmodel.ops._attention import ATTENTION
from perfmodel.ops._conv import CONVOLUTION
from perfmodel.ops._embedding import EMBEDDING
from perfmodel.ops._gemm import GEMM
from perfmodel.ops._memory import MEMORY
from perfmodel.ops._moe import MOE
from perfmodel.ops._optimizer import OPTIMIZER
from perfmodel.ops._recurrence import RECURRENCE

FAMILIES: Final = MappingProxyType({
    family.name: family for family in (GEMM, ATTENTION, MEMORY, EMBEDDING, OPTIMIZER, CONVOLUTION, MOE, RECURRENCE)
})  # fmt: skip
"""A family is added by its module and its entry here."""
