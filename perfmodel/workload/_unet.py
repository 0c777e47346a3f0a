"""U-Nets of latent diffusion as a sequence of blocks: residual units with transformer layers behind
them, on square images."""

from dataclasses import dataclass

from perfmodel.errors import LayoutError
from perfmodel.spec import Job, Transformer
from perfmodel.spec.unet import UNet, UNetPart
from perfmodel.workload._attention import cross_attention, self_attention
from perfmodel.workload._block import Blocks, Shard
from perfmodel.workload._convolution import require_unsplit_images
from perfmodel.workload._image_pieces import ImagePieces
from perfmodel.workload._linear import linear
from perfmodel.workload._local import Precision, local_sizes
from perfmodel.workload._piece import Piece, assemble, memory, pointwise
from perfmodel.workload._pointwise import feed_forward, sub_layer


def unet_blocks(model: UNet, job: Job, shard: Shard) -> Blocks:
    """Blocks in execution order, one for each part, the first with the embedding of the time step.

    Whoever cuts the network between two of them sends what the way down has left for the way up,
    too.

    Raises:
        LayoutError: for tensor, context or expert parallelism, and for varied lengths.
    """
    require_unsplit_images(model, shard)
    if job.varied_lengths:
        raise LayoutError(f"{model.name}: images have no varied lengths; leave mean_tokens out")
    parts = _Parts(
        images=shard.micro_batch,
        precision=Precision.of(job),
        model=model,
        job=job,
        shard=shard,
    )
    blocks = []
    waiting_bytes = 0.0
    for place, part in enumerate(model.parts):
        waiting_bytes -= parts.image_bytes(part.skip, part.size_in)
        pieces = parts.pieces(part)
        if place == 0:
            pieces = [*parts.embedded_conditions(), *pieces]
        is_last = place == len(model.parts) - 1
        if is_last:
            pieces = [*parts.norm_and_silu(part.c_in, part.size_in), *pieces]
        input_bytes = parts.image_bytes(part.c_in, part.size_in)
        output_bytes = parts.image_bytes(part.c_out, part.size_out)
        if part.is_read_again:
            waiting_bytes += output_bytes
        # What the way up reads again may be the output itself, which is sent once.
        sent_bytes = waiting_bytes if part.is_read_again else waiting_bytes + output_bytes
        block = assemble(
            part.name,
            pieces,
            train=job.mode == "train",
            input_bytes=input_bytes,
            workspace_bytes=input_bytes + output_bytes,
            boundary_bytes=0.0 if is_last else sent_bytes,
            stops_recompute=job.activations.stops_recompute,
            modules=job.activations.recompute_modules,
        )
        blocks.append((block, 1))
    return tuple(blocks)


@dataclass(frozen=True, kw_only=True)
class _Parts(ImagePieces):
    """The pieces of a network's parts for one micro-batch."""

    model: UNet
    job: Job
    shard: Shard

    def pieces(self, part: UNetPart) -> list[Piece]:
        """A residual unit with its transformer layers, or a convolution alone."""
        if part.kind == "unit":
            return [*self._unit(part), *self._transformer(part)]
        doubled: list[Piece] = []
        if part.kind == "doubling":
            # Each pixel is repeated twice in both directions before the convolution.
            doubled = [self.copied(part.c_in, part.size_out)]
        stride = 2 if part.kind == "halving" else 1
        size = part.size_out if part.kind == "doubling" else part.size_in
        return [*doubled, self.convolution(part.name, part.c_in, part.c_out, size, stride=stride)]

    def embedded_conditions(self) -> list[Piece]:
        """Two products for the time step, and two for further conditions where there are any."""
        width = self.model.embedding_width
        inputs = [self.model.channels[0]]
        if self.model.added_width:
            inputs.append(self.model.added_width)
        pieces = []
        for input_width in inputs:
            pieces += [
                linear(self.precision, self.images, width, input_width, bias=width),
                self.silu(width, 1),
                linear(self.precision, self.images, width, width, bias=width),
            ]
        return pieces

    def _unit(self, part: UNetPart) -> list[Piece]:
        """Norm, SiLU and convolution, twice, with the time step added in between, beside a shortcut
        (diffusers, `ResnetBlock2D`)."""
        c_in, c_out, size = part.c_in, part.c_out, part.size_in
        pieces: list[Piece] = []
        if part.skip:
            # Input and skip connection are copied into one tensor. Backward adds the gradient of
            # what the way down left to that of what followed there.
            joined = memory(self.precision, "add", self.images * c_in, size**2)
            summed = memory(self.precision, "add", self.images * part.skip, size**2, 2)
            pieces.append(Piece(forward=(joined,), backward_input=(summed,)))
        width = self.model.embedding_width
        pieces += [
            *self.norm_and_silu(c_in, size),
            self.convolution(f"{part.name}.1", c_in, c_out, size, kernel=3),
            self.silu(width, 1),
            linear(self.precision, self.images, c_out, width, bias=c_out),
            pointwise(self.precision, [("add", 1)], self.images * c_out, size**2),
            *self.norm_and_silu(c_out, size),
            self.convolution(f"{part.name}.2", c_out, c_out, size, kernel=3),
        ]
        # The shortcut is a convolution of single pixels where the number of channels changes.
        if c_in != c_out:
            shortcut = self.convolution(f"{part.name}.shortcut", c_in, c_out, size, kernel=1)
            pieces.append(shortcut)
        return [*pieces, self.summed(c_out, size)]

    def _transformer(self, part: UNetPart) -> list[Piece]:
        """Transformer layers over the pixels of an image, each with attention on its text, between
        two products (diffusers, `Transformer2DModel`)."""
        if not part.layers:
            return []
        width = part.c_out
        pixels = part.size_in**2
        layer = transformer_of(self.model, part)
        local = local_sizes(layer, self.job, self.shard, pixels)
        text = {"memory_len": self.model.text_tokens, "memory_width": self.model.text_width}
        pieces = self.group_norm(width, part.size_in)
        # The pixels of an image are put next to one another unless its channels already are last.
        permuted = [] if self.job.kernels.channels_last else [self.copied(width, part.size_in)]
        rows = self.images * pixels
        pieces += [*permuted, linear(self.precision, rows, width, width, bias=width)]
        for _ in range(part.layers):
            pieces += sub_layer(layer, local, self_attention(layer, local, causal=False))
            pieces += sub_layer(layer, local, cross_attention(layer, local, **text))
            pieces += sub_layer(layer, local, feed_forward(layer, local))
        pieces += [linear(self.precision, rows, width, width, bias=width), *permuted]
        return [*pieces, self.summed(width, part.size_in)]


def transformer_of(model: UNet, part: UNetPart) -> Transformer:
    """The transformer layers behind a unit as a model of their own, on the pixels of an image."""
    width = part.c_out
    return Transformer(
        name=f"{model.name} {part.name}",
        layers=part.layers,
        hidden=width,
        heads=part.heads,
        kv_heads=part.heads,
        head_dim=width // part.heads,
        ffn_hidden=4 * width,
        # There is no vocabulary; one row is the least that a transformer may state.
        vocab=1,
        seq_len=part.size_in**2,
        causal=False,
        gated_ffn=True,
        dropout=False,
        positions="none",
        unbiased_projections=("query", "key", "value"),
    )
