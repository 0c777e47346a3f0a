"""What a model computes: kernels, collectives, parameters and bytes per block and device. No JAX."""

from perfmodel.display import shorten_reprs
from perfmodel.workload._block import ActivationBytes as ActivationBytes
from perfmodel.workload._block import BlockOps as BlockOps
from perfmodel.workload._block import Comm as Comm
from perfmodel.workload._block import ExpertChoice as ExpertChoice
from perfmodel.workload._block import Kernels as Kernels
from perfmodel.workload._block import Shard as Shard
from perfmodel.workload._block import matmul_flops as matmul_flops
from perfmodel.workload._blocks import blocks as blocks
from perfmodel.workload._cache import layer_cache_bytes as layer_cache_bytes
from perfmodel.workload._flops import ModelFlops as ModelFlops
from perfmodel.workload._flops import step_flops as step_flops
from perfmodel.workload._local import storage_dtype as storage_dtype
from perfmodel.workload._optimizer import optimizer_op as optimizer_op
from perfmodel.workload._parameters import Parameters as Parameters
from perfmodel.workload._parameters import parameter_count as parameter_count
from perfmodel.workload._parameters import parameters as parameters
from perfmodel.workload._quantisation import QUANTISING as QUANTISING
from perfmodel.workload._quantisation import is_cast as is_cast

shorten_reprs(__name__)
