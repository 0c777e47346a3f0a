"""Forward passes of the frozen encoders whose outputs a diffusion model is trained on.

They run before the model in every micro-batch, unless their outputs are cached. Nothing of them has
gradients, so that nothing is kept for a backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perfmodel.spec import Job, Transformer
from perfmodel.spec.encoders import AUTOENCODERS, TEXT_ENCODERS, Autoencoder
from perfmodel.spec.parts import FrozenEncoder
from perfmodel.units import dtype_bytes
from perfmodel.workload._attention import self_attention
from perfmodel.workload._block import Blocks, Kernels, Shard
from perfmodel.workload._image_pieces import ImagePieces
from perfmodel.workload._local import Precision, local_sizes
from perfmodel.workload._parameters import parameters
from perfmodel.workload._piece import Piece, assemble
from perfmodel.workload._transformer import transformer_blocks

COLOURS = 3


class EncoderPass(NamedTuple):
    """The forward pass of one encoder for a micro-batch."""

    forward: Kernels
    params: int
    """Frozen parameters."""
    workspace_bytes: float
    """Largest tensors of the pass, which exist at the same time."""


def with_encoders(
    blocks: Blocks, encoders: Sequence[FrozenEncoder], latent_size: int, job: Job, shard: Shard
) -> Blocks:
    """Blocks of a model whose first one also runs the frozen encoders of its inputs.

    Args:
        encoders: those of the model.
        latent_size: height and width of the latents.
    """
    passes = []
    for encoder in encoders:
        is_cached = (
            job.fine_tuning.cached_text if encoder.is_of_text else job.fine_tuning.cached_latents
        )
        if not is_cached:
            passes.append(_encoder_pass(encoder, latent_size, job, shard))
    if not passes:
        return blocks

    # Encoders run one after another, and ranks that divide the model each run all of them.
    (first, repeats), *others = blocks
    forward: Kernels = ()
    for encoder_pass in passes:
        forward += encoder_pass.forward
    params = sum(encoder_pass.params for encoder_pass in passes)
    first = replace(
        first,
        forward=forward + first.forward,
        params=first.params + params,
        frozen_params=first.frozen_params + params,
        workspace_bytes=max(
            first.workspace_bytes, *(encoder_pass.workspace_bytes for encoder_pass in passes)
        ),
    )
    return ((first, repeats), *others)


def _encoder_pass(encoder: FrozenEncoder, latent_size: int, job: Job, shard: Shard) -> EncoderPass:
    """The forward pass of an encoder, in 16 bits where the job's products are narrower."""
    encoding = Job(
        global_batch=job.global_batch,
        seq_len=encoder.tokens,
        dtype=job.dtype if dtype_bytes(job.dtype) >= 2 else "bf16",
        mode="inference",
    )
    encoding = replace(encoding, kernels=job.kernels)
    whole = Shard(micro_batch=shard.micro_batch)
    if encoder.is_of_text:
        return _text_pass(TEXT_ENCODERS[encoder.name], encoding, whole)
    return _image_pass(AUTOENCODERS[encoder.name], latent_size, encoding, whole)


def _text_pass(model: Transformer, job: Job, shard: Shard) -> EncoderPass:
    """The forward pass of a text encoder, whose last hidden states are its output."""
    *blocks, _ = transformer_blocks(model, job, shard)
    forward: Kernels = ()
    for block, repeats in blocks:
        forward += tuple((op, count * repeats) for op, count in block.forward)
    return EncoderPass(
        forward=forward,
        # Tables are not padded.
        params=parameters(model).total,
        workspace_bytes=max(block.workspace_bytes for block, _ in blocks),
    )


def _image_pass(encoder: Autoencoder, latent_size: int, job: Job, shard: Shard) -> EncoderPass:
    """The forward pass of an autoencoder's encoder (diffusers, `autoencoders/vae.py`)."""
    on_images = ImagePieces(images=shard.micro_batch, precision=Precision.of(job))
    size = latent_size * encoder.reduction
    c = encoder.channels[0]
    largest_bytes = on_images.image_bytes(c, size)
    pieces = [on_images.convolution("conv_in", COLOURS, c, size)]
    last = len(encoder.channels) - 1
    for scale, width in enumerate(encoder.channels):
        for _ in range(encoder.units):
            pieces += _unit(on_images, c, width, size)
            largest_bytes = max(largest_bytes, on_images.image_bytes(width, size))
            c = width
        if scale < last:
            pieces.append(on_images.convolution("half", c, c, size, stride=2))
            size //= 2

    # At the coarsest scale, pixels attend to one another between two units.
    pieces += _unit(on_images, c, c, size)
    pieces += _attention_of_pixels(on_images, c, size, job, shard)
    pieces += _unit(on_images, c, c, size)

    # Mean and variance of every latent.
    moments = 2 * encoder.latent_channels
    pieces += on_images.norm_and_silu(c, size)
    pieces.append(on_images.convolution("conv_out", c, moments, size))
    if encoder.quantisation:
        pieces.append(on_images.convolution("quantisation", moments, moments, size, kernel=1))
    block = assemble("image encoder", pieces, train=False, workspace_bytes=2 * largest_bytes)
    return EncoderPass(block.forward, block.params, block.workspace_bytes)


def _unit(on_images: ImagePieces, c_in: int, c_out: int, size: int) -> list[Piece]:
    """A residual unit without a time step (diffusers, `ResnetBlock2D`)."""
    pieces = [
        *on_images.norm_and_silu(c_in, size),
        on_images.convolution("unit.1", c_in, c_out, size),
        *on_images.norm_and_silu(c_out, size),
        on_images.convolution("unit.2", c_out, c_out, size),
    ]
    if c_in != c_out:
        pieces.append(on_images.convolution("unit.shortcut", c_in, c_out, size, kernel=1))
    return [*pieces, on_images.summed(c_out, size)]


def _attention_of_pixels(
    on_images: ImagePieces, channels: int, size: int, job: Job, shard: Shard
) -> list[Piece]:
    """Attention of one head, as wide as the image has channels."""
    layer = Transformer(
        name="attention of pixels",
        layers=1,
        hidden=channels,
        heads=1,
        kv_heads=1,
        head_dim=channels,
        ffn_hidden=channels,
        # There is no vocabulary; one row is the least that a transformer may state.
        vocab=1,
        seq_len=size**2,
        causal=False,
        dropout=False,
        positions="none",
    )
    local = local_sizes(layer, job, shard, size**2)
    return [
        *on_images.group_norm(channels, size),
        *self_attention(layer, local, causal=False),
        on_images.summed(channels, size),
    ]
