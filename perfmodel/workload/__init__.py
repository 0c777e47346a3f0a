"""What a model computes: kernels, collectives, parameters and bytes per block and device. No JAX."""

from perfmodel.display import shorten_reprs
from perfmodel.workload._block import (
    ActivationBytes,
    BlockOps,
    Comm,
    ExpertChoice,
    Kernels,
    Shard,
    matmul_flops,
)
from perfmodel.workload._blocks import blocks
from perfmodel.workload._context_parallel import undivided
from perfmodel.workload._flops import ModelFlops, step_flops
from perfmodel.workload._local import storage_dtype
from perfmodel.workload._optimizer import optimizer_op, orthogonalisation
from perfmodel.workload._parameters import (
    Parameters,
    layer_cache_bytes,
    parameter_count,
    parameters,
)
from perfmodel.workload._quantisation import QUANTISING, is_cast

shorten_reprs(__name__)
