"""Every kind of model as blocks."""

from functools import singledispatch

from perfmodel.spec import ConvNet, Job, Mlp, Model, Transformer
from perfmodel.workload._block import BlockOps, Shard
from perfmodel.workload._convnet import convnet_blocks
from perfmodel.workload._mlp import mlp_blocks
from perfmodel.workload._transformer import transformer_blocks


@singledispatch
def blocks(model: Model, job: Job, shard: Shard) -> tuple[tuple[BlockOps, int], ...]:
    """Blocks of `model` in order, each with how often it repeats, for one micro-batch on one device.

    A pipeline may be cut between any two of them.

    Raises:
        LayoutError: if the shard does not divide the model; the message names the remedy.
    """
    raise TypeError(f"not a model: {model!r}")


blocks.register(Transformer, transformer_blocks)
blocks.register(Mlp, mlp_blocks)
blocks.register(ConvNet, convnet_blocks)
