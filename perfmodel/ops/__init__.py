"""Families of kernels, each a module: shape, work, physics, how tables state it and how it is measured."""

from perfmodel.display import shorten_reprs
from perfmodel.ops._attention import ATTENTION_MASKS as ATTENTION_MASKS
from perfmodel.ops._attention import LATENT_DECODE as LATENT_DECODE
from perfmodel.ops._attention import Attention as Attention
from perfmodel.ops._collective import Collective as Collective
from perfmodel.ops._collective import CollectiveKind as CollectiveKind
from perfmodel.ops._conv import Convolution as Convolution
from perfmodel.ops._embedding import Embedding as Embedding
from perfmodel.ops._family import Axis as Axis
from perfmodel.ops._family import Family as Family
from perfmodel.ops._family import GradientProducts as GradientProducts
from perfmodel.ops._family import Measurement as Measurement
from perfmodel.ops._family import ShapeColumn as ShapeColumn
from perfmodel.ops._gemm import Gemm as Gemm
from perfmodel.ops._kernel import KernelOp as KernelOp
from perfmodel.ops._kernel import Pass as Pass
from perfmodel.ops._kernel import Shape as Shape
from perfmodel.ops._kernel import Work as Work
from perfmodel.ops._kind import KernelKind as KernelKind
from perfmodel.ops._kind import KindColumns as KindColumns
from perfmodel.ops._memory import MEASURED as MEASURED_MEMORY_OPS
from perfmodel.ops._memory import MemoryBound as MemoryBound
from perfmodel.ops._moe import NONGATED_MOE as NONGATED_MOE
from perfmodel.ops._moe import MoE as MoE
from perfmodel.ops._optimizer import OptimizerStep as OptimizerStep
from perfmodel.ops._physics import Machine as Machine
from perfmodel.ops._physics import Physics as Physics
from perfmodel.ops._physics import cached_share as cached_share
from perfmodel.ops._physics import common_features as common_features
from perfmodel.ops._physics import compute_seconds as compute_seconds
from perfmodel.ops._physics import memory_seconds as memory_seconds
from perfmodel.ops._physics import vector_rate as vector_rate
from perfmodel.ops._programs import JAX_DTYPES as JAX_DTYPES
from perfmodel.ops._programs import TORCH_DTYPES as TORCH_DTYPES
from perfmodel.ops._programs import Program as Program
from perfmodel.ops._programs import Tensors as Tensors
from perfmodel.ops._programs import torch_module as torch_module
from perfmodel.ops._recurrence import Recurrence as Recurrence
from perfmodel.ops._registry import FAMILIES as FAMILIES

Op = KernelOp | Collective
"""What one event computes or moves, independent of model, layout and device."""

shorten_reprs(__name__)
