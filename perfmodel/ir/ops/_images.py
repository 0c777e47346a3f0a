"""Convolutions and pooling of images [batch, channels, height, width]."""

from typing import Any

from perfmodel.ir._instruction import Instruction, RuleError
from perfmodel.ir.op_definition import (
    REPLICATED,
    Emitter,
    Names,
    OpDefinition,
    Partial,
    Sharded,
    Sharding,
    ShardingDecision,
    ShardingQuery,
    ShardRule,
    Tensors,
    Values,
    WorkRule,
    kernel_dtype,
    memory_bound,
    operands,
    require_gradient_of,
    required,
    table,
)
from perfmodel.ir.ops._elementwise import gradient_of_operands, same_dtype
from perfmodel.ops import Convolution, Op

Pair = tuple[int, int]
POOLS = ("max", "mean")


def _pair(attributes: Values, name: str, minimum: int) -> Pair:
    """Return an attribute that must be two whole numbers, such as a stride."""
    pair = required(attributes, name, tuple)
    are_whole = all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not are_whole or min(pair) < minimum:
        raise RuleError(f"{name} must be two whole numbers of at least {minimum}, got {pair}")
    return pair


def _slid(image: tuple[int, ...], window: tuple[int, ...], attributes: Values) -> Pair:
    """Height and width of the result of a window that slides over an image."""
    stride = _pair(attributes, "stride", 1)
    padding = _pair(attributes, "padding", 0)
    # Positions at which the window lies inside the padded image; the rest of a stride is cut off.
    positions = []
    for size, extent, step, pad in zip(image, window, stride, padding, strict=True):
        positions.append((size + 2 * pad - extent) // step + 1)
    height, width = positions
    if min(height, width) < 1:
        raise RuleError(
            f"a window of {window} is larger than an image of {image} padded by {padding}"
        )
    return height, width


def _conv2d(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a convolution of an image [N, C, H, W] with a kernel [K, C / groups, h, w]."""
    operands(2, inputs)
    same_dtype(inputs)
    x, w = inputs
    groups = required(attributes, "groups", int)
    are_images = x.rank == w.rank == 4
    if not are_images or groups < 1 or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise RuleError(f"image {x.shape} and kernel {w.shape} do not match with {groups} groups")
    size = _slid(x.shape[2:], w.shape[2:], attributes)
    return (x.with_shape((x.shape[0], w.shape[0], *size)),)


def _conv2d_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a convolution: one op per operand."""
    x, w = instruction.inputs
    values = dict(instruction.attributes)
    # Strides round down, so several sizes of image give the same result; the gradients state the
    # size they need.
    image, kernel = emitter.types[x].shape[2:], emitter.types[w].shape[2:]
    dx = emitter.op("conv2d_input_grad", w, dy, image=image, **values)
    dw = emitter.op("conv2d_weight_grad", x, dy, kernel=kernel, **values)
    return dx, dw


def _input_grad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a convolution's gradient with respect to the image."""
    operands(2, inputs)
    w, dy = inputs
    groups = required(attributes, "groups", int)
    image = _pair(attributes, "image", 1)
    # The forward rule checks all sizes, if it is applied to the image whose gradient is computed.
    x = dy.with_shape((dy.shape[0], w.shape[1] * groups, *image))
    require_gradient_of(_conv2d((x, w), attributes)[0], dy)
    return (x,)


def _weight_grad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a convolution's gradient with respect to the kernel."""
    operands(2, inputs)
    x, dy = inputs
    groups = required(attributes, "groups", int)
    kernel = _pair(attributes, "kernel", 1)
    if x.rank != 4 or dy.rank != 4 or groups < 1:
        raise RuleError(
            f"needs two batches of images and at least one group; got shapes {x.shape} and {dy.shape}, {groups} groups"
        )
    w = x.with_shape((dy.shape[1], x.shape[1] // groups, *kernel))
    require_gradient_of(_conv2d((x, w), attributes)[0], dy)
    return (w,)


def _conv2d_work(pass_: Any) -> WorkRule:
    """The rule for the kernel of a convolution in one of its three passes."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
        # Kernels of all three passes are described by the forward's image and filter; only their
        # place differs.
        if pass_ == "fwd":
            x, w = inputs
        elif pass_ == "dgrad":
            (x,), w = outputs, inputs[0]
        else:
            x, (w,) = inputs[0], outputs
        (stride_h, stride_w), (pad_h, pad_w) = attributes["stride"], attributes["padding"]
        kernel = Convolution(
            dtype=kernel_dtype(x),
            batch=x.shape[0],
            c_in=x.shape[1],
            h_in=x.shape[2],
            w_in=x.shape[3],
            c_out=w.shape[0],
            k_h=w.shape[2],
            k_w=w.shape[3],
            stride_h=stride_h,
            stride_w=stride_w,
            pad_h=pad_h,
            pad_w=pad_w,
            groups=attributes["groups"],
            pass_=pass_,
        )
        return (kernel,)

    return work


def _shard_conv2d(*roles: str) -> ShardRule:
    """Spread a convolution by samples, result channels, or (with one group) image channels.

    Args:
        roles: roles of operands and result: `x` image, `w` kernel, `y` result, each along two axes
            that it shares with another.
    """
    # A convolution is a product over samples, input and output channels: whichever is cut is cut in
    # the two tensors that have it, and if the result lacks it, its parts are partial sums.
    axis_of = {"x": {"sample": 0, "in": 1}, "w": {"out": 0, "in": 1}, "y": {"sample": 0, "out": 1}}
    *inputs, made = roles

    def shard(query: ShardingQuery) -> ShardingDecision:
        for k, role in enumerate(inputs):
            axis = query.sharded_axis(k)
            shared = next((name for name, at in axis_of[role].items() if at == axis), None)
            # Channels of several groups do not mix, so that a slice of them is not a convolution of
            # the same kind.
            if shared is None or (shared != "sample" and query.attributes["groups"] > 1):
                continue

            def along(role: str, shared: str = shared) -> Sharding:
                axis_position = axis_of[role].get(shared)
                return REPLICATED if axis_position is None else Sharded(axis_position)

            out = along(made) if shared in axis_of[made] else Partial("sum")
            return ShardingDecision(tuple(map(along, inputs)), (out,))
        return query.replicated()

    return shard


def _pool2d(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a pooling by maximum or mean over a window."""
    operands(1, inputs)
    (x,) = inputs
    if required(attributes, "kind", str) not in POOLS or x.rank != 4:
        raise RuleError(
            f"kind must be max or mean, of an image of 4 axes; got {attributes['kind']!r} of {x.shape}"
        )
    size = _slid(x.shape[2:], _pair(attributes, "kernel", 1), attributes)
    return (x.with_shape((*x.shape[:2], *size)),)


def _shard_pool2d(query: ShardingQuery) -> ShardingDecision:
    """Spread a pooling by samples or channels."""
    # Windows overlap along height and width; samples and channels are independent.
    return query.all_along_one_axis(lambda axis: axis < 2)


IMAGES = table(
    # [n, c, h, w] * [o, c / groups, k, l] under `stride`, `padding` (both by height and width) and
    # `groups`
    OpDefinition(
        name="conv2d",
        infer=_conv2d,
        work=_conv2d_work("fwd"),
        gradient=_conv2d_gradient,
        shard=_shard_conv2d("x", "w", "y"),
    ),
    OpDefinition(
        name="conv2d_input_grad",
        infer=_input_grad,
        work=_conv2d_work("dgrad"),
        shard=_shard_conv2d("w", "y", "x"),
    ),
    OpDefinition(
        name="conv2d_weight_grad",
        infer=_weight_grad,
        work=_conv2d_work("wgrad"),
        shard=_shard_conv2d("x", "y", "w"),
    ),
    # the largest or the mean of a `kernel` of elements; the padding counts as zeros of a mean
    OpDefinition(
        name="pool2d",
        infer=_pool2d,
        work=memory_bound("copy"),
        shard=_shard_pool2d,
        gradient=lambda emitter, instruction, dy: emitter.emit(
            "pool2d_grad", (*instruction.inputs, dy), ("pool2d_grad",), instruction.attributes
        ),
    ),
    OpDefinition(
        name="pool2d_grad",
        infer=gradient_of_operands(_pool2d),
        work=memory_bound("copy"),
        shard=_shard_pool2d,
    ),
)
