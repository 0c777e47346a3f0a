"""VGG and residual networks, written out layer by layer from their papers' rules."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from perfmodel.spec import ConvLayer, ConvNet

CLASSES, IMAGE_SIZE = 1000, 224
"""ImageNet."""
_VGG16_ALIASES = ("vgg16",)


class UnmadeConvNet(NamedTuple):
    """A network of the catalog whose layers are built on first use."""

    make: Callable[[], ConvNet]
    aliases: tuple[str, ...]


def conv_nets() -> dict[str, UnmadeConvNet]:
    """The convolutional networks of the catalog, by name."""
    networks = {"vgg-16": UnmadeConvNet(vgg16, _VGG16_ALIASES)}
    for depth in _DEPTHS:
        networks[f"resnet-{depth}"] = UnmadeConvNet(partial(resnet, depth), _resnet_aliases(depth))
    return networks


def vgg16(image_size: int = IMAGE_SIZE, classes: int = CLASSES) -> ConvNet:
    """Configuration D of Simonyan and Zisserman (arXiv 1409.1556, table 1), by default for
    ImageNet."""
    stack: list[ConvLayer] = []
    c_in, size = 3, image_size
    for group, (width, depth) in enumerate(
        ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1
    ):
        for i in range(1, depth + 1):
            name = f"conv_{group}.{i}"
            stack.append(
                ConvLayer(
                    name=name,
                    op="conv",
                    c_in=c_in,
                    size_in=size,
                    c_out=width,
                    kernel=3,
                    pad=1,
                    relu=True,
                )
            )
            c_in = width
        # Every group ends with a pool that halves the image, and the next one is twice as wide
        # until 512.
        stack.append(_pool(f"conv_{group}.pool", "max_pool", c_in, size, kernel=2, stride=2))
        size //= 2
    # The first dense layer reads the whole last image: 25,088 inputs, three quarters of all
    # parameters.
    for i, (width, k, s) in enumerate(
        ((4096, c_in, size), (4096, 4096, 1), (classes, 4096, 1)), start=1
    ):
        stack.append(
            ConvLayer(
                name=f"classifier_{i}",
                op="linear",
                c_in=k,
                size_in=s,
                c_out=width,
                relu=i < 3,
            )
        )
    return ConvNet(
        name="vgg-16",
        stack=tuple(stack),
        image_size=image_size,
        aliases=_VGG16_ALIASES,
        source="Simonyan and Zisserman 2014, arXiv 1409.1556, table 1 D",
    )


_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(depth: int, image_size: int = IMAGE_SIZE, classes: int = CLASSES) -> ConvNet:
    """Bottleneck residual network (He et al., arXiv 1512.03385, table 1), stride in the 3x3
    convolution (version 1.5, as NVIDIA and torchvision train it), by default for ImageNet."""
    # The stem halves the image twice: by the stride of its convolution and by that of its pool.
    size = image_size // 2
    stack = [
        ConvLayer(
            name="conv_1.1",
            op="conv",
            c_in=3,
            size_in=image_size,
            c_out=64,
            kernel=7,
            stride=2,
            pad=3,
            batch_norm=True,
            relu=True,
        ),
        _pool("conv_1.pool", "max_pool", 64, size, kernel=3, stride=2, pad=1),
    ]
    size //= 2
    c_in = 64
    # Each group halves the image and doubles the width in its first unit, the first group excepted.
    for group, units in enumerate(_DEPTHS[depth], start=2):
        width = 64 * 2 ** (group - 2)
        for unit in range(units):
            stride = 2 if unit == 0 and group > 2 else 1
            name = f"conv_{group}_{'first' if unit == 0 else 'rest'}"
            stack += _bottleneck(name, c_in, width, size, stride, project=unit == 0)
            size //= stride
            c_in = 4 * width
    stack += [
        _pool("classifier.pool", "avg_pool", c_in, size, kernel=size, stride=size),
        ConvLayer(name="classifier.fc", op="linear", c_in=c_in, size_in=1, c_out=classes),
    ]
    return ConvNet(
        name=f"resnet-{depth}",
        stack=tuple(stack),
        image_size=image_size,
        aliases=_resnet_aliases(depth),
        source="He et al. 2015, arXiv 1512.03385, table 1; stride as in version 1.5",
    )


def _resnet_aliases(depth: int) -> tuple[str, ...]:
    """Other names of a residual network: without the dash, and with the version whose strides it
    has."""
    return f"resnet{depth}", f"resnet{depth}-v1.5"


def _bottleneck(
    name: str, c_in: int, width: int, size: int, stride: int, *, project: bool
) -> Iterator[ConvLayer]:
    """1x1, 3x3, 1x1; with a projected shortcut where the shape changes. The last adds the
    shortcut."""
    # Version 1 had the stride in the first 1x1: moving it to the 3x3 gains accuracy and costs some
    # more arithmetic.
    out_size = size // stride
    yield ConvLayer(
        name=f"{name}.a",
        op="conv",
        c_in=c_in,
        size_in=size,
        c_out=width,
        batch_norm=True,
        relu=True,
    )
    yield ConvLayer(
        name=f"{name}.b",
        op="conv",
        c_in=width,
        size_in=size,
        c_out=width,
        kernel=3,
        stride=stride,
        pad=1,
        batch_norm=True,
        relu=True,
    )
    # The shortcut is projected once per group, where width (and image) change.
    if project:
        yield ConvLayer(
            name=f"{name}.shortcut",
            op="conv",
            c_in=c_in,
            size_in=size,
            c_out=4 * width,
            stride=stride,
            batch_norm=True,
        )
    yield ConvLayer(
        name=f"{name}.c",
        op="conv",
        c_in=width,
        size_in=out_size,
        c_out=4 * width,
        batch_norm=True,
        relu=True,
        residual=True,
    )


def _pool(
    name: str, op: str, channels: int, size: int, *, kernel: int, stride: int, pad: int = 0
) -> ConvLayer:
    """A pooling layer, of the largest value or of the mean."""
    return ConvLayer(
        name=name,
        op="max_pool" if op == "max_pool" else "avg_pool",
        c_in=channels,
        size_in=size,
        c_out=channels,
        kernel=kernel,
        stride=stride,
        pad=pad,
    )
