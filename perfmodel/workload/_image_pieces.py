"""Pieces on square images that U-Nets and autoencoders are made of."""

from dataclasses import dataclass, replace

from perfmodel.spec import ConvLayer
from perfmodel.workload._convolution import convolution, norm_at_bandwidth
from perfmodel.workload._local import Precision
from perfmodel.workload._piece import Piece, between_casts, memory, pointwise


@dataclass(frozen=True, kw_only=True)
class ImagePieces:
    """Convolutions, norms and sums over the images of one micro-batch."""

    images: int
    """Images of the micro-batch."""
    precision: Precision

    def image_bytes(self, channels: int, size: int) -> float:
        """Bytes of the micro-batch's images with so many channels."""
        return float(self.images * channels * size**2 * self.precision.act_bytes)

    def convolution(
        self, name: str, c_in: int, c_out: int, size: int, *, kernel: int = 3, stride: int = 1
    ) -> Piece:
        """A convolution with biases."""
        layer = ConvLayer(
            name=name,
            op="conv",
            c_in=c_in,
            c_out=c_out,
            size_in=size,
            kernel=kernel,
            stride=stride,
            pad=kernel // 2,
        )
        return convolution(layer, self.precision, self.images)

    def norm_and_silu(self, channels: int, size: int) -> list[Piece]:
        """A group norm and SiLU, each of which keeps its input.

        A norm in fp32 gives fp32, and SiLU computes in the type that it is given.
        """
        wide = replace(self, precision=self.precision.of_norms)
        pieces = [wide._group_norm(channels, size), wide.silu(channels, size)]
        return self._cast_around(channels, size, pieces)

    def group_norm(self, channels: int, size: int) -> list[Piece]:
        """A norm over groups of channels."""
        wide = replace(self, precision=self.precision.of_norms)
        return self._cast_around(channels, size, [wide._group_norm(channels, size)])

    def _cast_around(self, channels: int, size: int, pieces: list[Piece]) -> list[Piece]:
        """A norm and what follows it in its type, with the casts around them, if there are any."""
        if not self.precision.wide_norms:
            return pieces
        return between_casts(self.precision, self.images * channels, size**2, pieces)

    def _group_norm(self, channels: int, size: int) -> Piece:
        """A norm over groups of channels, which moves what a batch norm moves."""
        rows = self.images * channels
        area = size**2
        norm = Piece(params=2 * channels, saved_bytes=self.image_bytes(channels, size))
        return norm_at_bandwidth(norm, self.precision, rows, area, 1)

    def silu(self, channels: int, size: int) -> Piece:
        """SiLU, which keeps its input."""
        return pointwise(
            self.precision,
            [("silu", 1)],
            self.images * channels,
            size**2,
            saved_bytes=self.image_bytes(channels, size),
        )

    def copied(self, channels: int, size: int) -> Piece:
        """A copy of the images in another order."""
        return pointwise(self.precision, [("add", 1)], self.images * channels, size**2)

    def summed(self, channels: int, size: int) -> Piece:
        """The sum of two branches; backward sums the gradients of their common input."""
        add = memory(self.precision, "add", self.images * channels, size**2, 2)
        return Piece(forward=(add,), backward_input=(add,))
