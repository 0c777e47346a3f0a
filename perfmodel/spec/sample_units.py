"""What the throughput of models is counted in."""

from typing import Literal

from perfmodel.spec._model import Mlp, Model, Transformer

SampleUnit = Literal["tokens", "images", "videos", "samples"]
"""What the throughput of a model is counted in."""


def sample_unit(model: Model) -> SampleUnit:
    """The unit in which people state a model's throughput: tokens of text, or whole images, videos
    or samples."""
    if isinstance(model, Mlp):
        return "samples"
    if not isinstance(model, Transformer):
        return "images"
    patches = model.inputs.patches
    if patches is None:
        return "tokens"
    return "videos" if patches.frames > 1 else "images"
