"""The work of a model: kernels, collectives, parameters and bytes per block and device.

- `_block` is the result: a layer, an embedding or a head as one device runs it. `_piece` puts it
  together of sub-layers, each with its forward and backward kernels, its collectives and what it
  keeps.
- `_local` divides a model's sizes by the degrees of a layout.
- `_linear`, `_attention` (`_attention_core`), `_experts`, `_recurrent`, `_pointwise`,
  `_embedding_head` and `_quantisation` make the sub-layers; `_transformer` and `_blocks` the
  models.
- `_flops` and `_parameters` count a whole model in closed form, `_optimizer` its update.
"""

from perfmodel.display import shorten_reprs
from perfmodel.workload._attention_core import undivided
from perfmodel.workload._block import (
    ActivationBytes,
    BlockOps,
    Comm,
    ExpertChoice,
    Kernels,
    Shard,
    layer_count,
    matmul_flops,
)
from perfmodel.workload._blocks import blocks
from perfmodel.workload._experts import fuses_experts
from perfmodel.workload._flops import ModelFlops, step_flops
from perfmodel.workload._local import padded_vocab, storage_dtype
from perfmodel.workload._parameters import (
    Parameters,
    layer_cache_bytes,
    parameter_count,
    parameters,
)
from perfmodel.workload._piece import optimizer_op, orthogonalisation
from perfmodel.workload._quantisation import QUANTISING, is_cast

shorten_reprs(__name__)
