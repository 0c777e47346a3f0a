"""Frozen descriptions of devices, clusters, models, layouts and ops. No JAX, no I/O."""

from perfmodel.spec._cluster import Cluster as Cluster
from perfmodel.spec._cluster import NetworkLevel as NetworkLevel
from perfmodel.spec._device import Device as Device
from perfmodel.spec._device import PeakRates as PeakRates
from perfmodel.spec._layout import Job as Job
from perfmodel.spec._layout import Layout as Layout
from perfmodel.spec._layout import Recompute as Recompute
from perfmodel.spec._model import ConvLayer as ConvLayer
from perfmodel.spec._model import ConvNet as ConvNet
from perfmodel.spec._model import Experts as Experts
from perfmodel.spec._model import LatentAttention as LatentAttention
from perfmodel.spec._model import Mlp as Mlp
from perfmodel.spec._model import Model as Model
from perfmodel.spec._model import Transformer as Transformer
from perfmodel.spec._ops import Attention as Attention
from perfmodel.spec._ops import Collective as Collective
from perfmodel.spec._ops import CollectiveKind as CollectiveKind
from perfmodel.spec._ops import Convolution as Convolution
from perfmodel.spec._ops import Embedding as Embedding
from perfmodel.spec._ops import Gemm as Gemm
from perfmodel.spec._ops import KernelOp as KernelOp
from perfmodel.spec._ops import MemoryBound as MemoryBound
from perfmodel.spec._ops import MoE as MoE
from perfmodel.spec._ops import Op as Op
from perfmodel.spec._ops import OptimizerStep as OptimizerStep
from perfmodel.spec._ops import Pass as Pass
