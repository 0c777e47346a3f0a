"""Convolutional networks, layer by layer."""

from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import PerfModelError
from perfmodel.spec._documented import Stated
from perfmodel.units import require_whole


@dataclass(frozen=True, kw_only=True)
class ConvLayer(Stated):
    """One layer of a convolutional network in execution order."""

    name: str
    op: Literal["conv", "max_pool", "avg_pool", "linear"]
    c_in: int
    size_in: int
    """Input height = width."""
    c_out: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    batch_norm: bool = False
    relu: bool = False
    residual: bool = False
    """The output is added to a skip connection."""

    def __post_init__(self) -> None:
        owner = f"layer {self.name}"
        require_whole(
            owner,
            {
                name: getattr(self, name)
                for name in ("c_in", "size_in", "c_out", "kernel", "stride")
            },
        )
        require_whole(owner, {"pad": self.pad}, least=0)

        # `kernel` has no meaning for a dense layer.
        if self.op != "linear" and self.kernel > self.size_in + 2 * self.pad:
            raise PerfModelError(
                f"{owner}: a kernel of {self.kernel} is larger than its input of {self.size_in} padded by {self.pad}"
            )

    @property
    def size_out(self) -> int:
        """Output height and width; 1 for a dense layer."""
        if self.op == "linear":
            return 1
        return (self.size_in + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def weights(self) -> int:
        """Number of weights, without biases."""
        # A dense layer is a convolution whose kernel is as large as its input.
        if self.op == "conv":
            area = self.kernel**2
        elif self.op == "linear":
            area = self.size_in**2
        else:
            area = 0
        return area * self.c_in * self.c_out


@dataclass(frozen=True, kw_only=True)
class ConvNet(Stated):
    """A convolutional network as an ordered list of layers (VGG, ResNet)."""

    name: str
    stack: tuple[ConvLayer, ...]
    image_size: int = 224
    seq_len: int = 1
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "convnet"

    def __post_init__(self) -> None:
        require_whole(
            f"model {self.name}", {"image_size": self.image_size, "seq_len": self.seq_len}
        )
        if not self.stack:
            raise PerfModelError(f"model {self.name}: stack: at least one layer is needed")
