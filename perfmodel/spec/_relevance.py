"""Fields of a job and kinds of kernels that matter only for some models."""

from collections.abc import Callable, Mapping
from typing import Final

from perfmodel.spec._model import ConvNet, Model, Transformer

_OF_SOME_TRANSFORMERS: Final[Mapping[str, Callable[[Transformer], bool]]] = {
    "repeated_keys": lambda model: model.kv_heads < model.heads,
    "masked_head": lambda model: model.head.pooler_and_mlm_head,
    "weighted_experts": lambda model: model.experts is not None,
    "expert_dispatcher": lambda model: model.experts is not None,
    "rope": lambda model: model.inputs.positions == "rope",
    "gelu_formula": lambda model: model.block.activation == "gelu",
    "clamp": lambda model: model.block.clamped_glu,
}
"""Fields of `Job` and kinds of `EagerKernel` that mean something for some transformers alone, and for which."""
_OF_CONVOLUTIONS: Final = ("fused_batch_norm", "channels_last")
"""Fields of `Job` that mean something for convolutional networks alone."""


def concerns(name: str, model: Model) -> bool:
    """Whether a field of a job, or a kernel, matters for a model."""
    if name in _OF_CONVOLUTIONS:
        return isinstance(model, ConvNet)

    # What is not listed means something for all models.
    means_something = _OF_SOME_TRANSFORMERS.get(name)
    if means_something is None:
        return True
    return isinstance(model, Transformer) and means_something(model)
