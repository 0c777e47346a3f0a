"""Matrix products and convolutions as kernels, with their exact FLOPs."""

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from perfmodel.ir.importers._graph import Array
from perfmodel.ops import Convolution, Gemm, KernelOp

Axes = tuple[int, ...]
Pair = tuple[int, int]
"""Height and width."""
Pass = Literal["fwd", "dgrad", "wgrad"]


def product(
    lhs: Array,
    rhs: Array,
    contract: tuple[Axes, Axes],
    batch: tuple[Axes, Axes],
    dtype: str | None = None,
) -> Gemm:
    """A generalised dot product: the axes to contract and the batch axes of both operands.

    `dtype` overrides the element type of the left operand.
    """
    # Axes that are neither contracted nor batch form the rows on the left and the columns on the
    # right.
    k = prod(lhs.shape[i] for i in contract[0])
    n_batch = prod(lhs.shape[i] for i in batch[0])
    m = lhs.n_elements // max(1, k * n_batch)
    n = rhs.n_elements // max(1, k * n_batch)
    return Gemm(
        op="bmm" if n_batch > 1 else "linear",
        dtype=dtype or lhs.dtype,
        m=m,
        n=n,
        k=k,
        batch=n_batch,
    )


def product_dtype(lhs: Array, full_precision: bool) -> str:
    """Element type of a product; fp32 runs as TF32 by default, as in XLA on accelerators."""
    if lhs.dtype == "fp32" and lhs.item_bytes == 4 and not full_precision:
        return "tf32"
    return lhs.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvShape:
    """A convolution of any rank in the canonical order of axes: batch, features, space."""

    dtype: str
    batch: int
    c_in: int
    """Features of the left operand."""
    c_out: int
    kernel_c_in: int
    """Features that the kernel sees: `c_in` over the number of groups."""
    space_in: Axes
    kernel: Axes
    space_out: Axes
    stride: Axes
    pad_low: Axes
    in_dilation: Axes
    kernel_dilation: Axes
    groups: int = 1
    batch_groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of the convolution: two per kernel tap on an element (not padding or holes)."""
        # Axes are independent, so the pairs of a window are products of pairs per axis.
        taps = prod(
            _valid_taps(*of_axis)
            for of_axis in zip(
                self.space_in,
                self.kernel,
                self.space_out,
                self.stride,
                self.pad_low,
                self.in_dilation,
                self.kernel_dilation,
                strict=True,
            )
        )
        return 2.0 * taps * (self.batch // self.batch_groups) * self.c_out * self.kernel_c_in


def _valid_taps(
    n_in: int, kernel: int, n_out: int, stride: int, low: int, in_dilation: int, dilation: int
) -> int:
    """Pairs (output position, kernel tap) of one axis that meet an input element."""
    # With holes in the input (a transposed convolution) positions are counted on the stretched
    # axis.
    reach = (n_in - 1) * in_dilation
    total = 0
    for tap in range(kernel):
        offset = tap * dilation - low
        # positions o with 0 <= o stride + offset <= reach; with holes, only every in_dilation-th
        # holds an element
        first = max(0, -(offset // stride))
        last = min(n_out - 1, (reach - offset) // stride)
        if in_dilation == 1:
            total += max(0, last - first + 1)
        else:
            positions = range(first, last + 1)
            total += sum((position * stride + offset) % in_dilation == 0 for position in positions)
    return total


def convolution(shape: ConvShape) -> KernelOp:
    """The kernel that times a convolution: the forward pass, or the gradient if its dilations show
    that it is one.

    Input gradients have holes in the left operand (the forward stride), weight gradients a kernel
    larger than the output; one of more than two spatial axes is timed as the product that it lowers
    to.
    """
    # Libraries lower it to a product over unfolded windows (im2col).
    if len(shape.kernel) > 2:
        return Gemm(
            dtype=shape.dtype,
            m=shape.batch * prod(shape.space_out),
            n=shape.c_out // shape.groups,
            k=shape.kernel_c_in * prod(shape.kernel),
            groups=shape.groups,
        )
    # A convolution of lines is one of images of height 1.
    lines = 2 - len(shape.kernel)
    image_in = _image(shape.space_in, lines)
    image_out = _image(shape.space_out, lines)
    kernel = _image(shape.kernel, lines)
    stride = _image(shape.stride, lines)
    holes = _image(shape.in_dilation, lines)
    spread = _image(shape.kernel_dilation, lines)
    pad = _image(tuple(max(0, p) for p in shape.pad_low), lines, 0)

    # Holes are the forward's stride, so this is an input gradient. The forward's image is this
    # result, its padding about half a kernel.
    if max(holes) > 1:
        channels = Channels(shape.batch, shape.c_out, shape.c_in, shape.groups)
        half_kernel = ((kernel[0] - 1) // 2, (kernel[1] - 1) // 2)
        return _kernel(
            shape.dtype, channels, Window(image_out, kernel, holes, half_kernel), "dgrad"
        )

    # A weight gradient slides the (large) output gradient over the image and gives the (small)
    # filter; batch and features trade places.
    if prod(kernel) > prod(image_out):
        groups = max(shape.groups, shape.batch_groups)
        channels = Channels(shape.kernel_c_in, shape.batch, shape.c_out, groups)
        return _kernel(shape.dtype, channels, Window(image_in, image_out, spread, pad), "wgrad")

    channels = Channels(shape.batch, shape.c_in, shape.c_out, shape.groups)
    return _kernel(shape.dtype, channels, Window(image_in, kernel, stride, pad), "fwd")


class Channels(NamedTuple):
    """Samples and features of the forward convolution whose pass is timed."""

    batch: int
    c_in: int
    c_out: int
    groups: int


class Window(NamedTuple):
    """Movement of the forward's kernel over its image, each by height and width."""

    image: Pair
    kernel: Pair
    stride: Pair
    pad: Pair


def _image(sizes: Axes, lines: int, filler: int = 1) -> Pair:
    """Return height and width of one or two spatial axes; missing axes have size `filler`."""
    height, width = (filler,) * lines + sizes
    return height, width


def _kernel(dtype: str, channels: Channels, window: Window, pass_: Pass) -> Convolution:
    """Return a convolution's pass as it is timed, with the forward's channels and window."""
    return Convolution(
        dtype=dtype,
        batch=channels.batch,
        c_in=channels.c_in,
        h_in=window.image[0],
        w_in=window.image[1],
        c_out=channels.c_out,
        k_h=window.kernel[0],
        k_w=window.kernel[1],
        stride_h=window.stride[0],
        stride_w=window.stride[1],
        pad_h=window.pad[0],
        pad_w=window.pad[1],
        groups=channels.groups,
        pass_=pass_,
    )
