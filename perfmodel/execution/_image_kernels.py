"""JAX kernels of convolutions and pooling; gradients are pullbacks of the forward kernel."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from perfmodel.program.ir import Tensor

Array = jax.Array
Values = Mapping[str, Any]
Outputs = Sequence[Tensor]


def conv2d(x: Array, w: Array, attributes: Values, outputs: Outputs) -> Array:
    """[n, c, h, w] with kernels [o, c / groups, k, l]."""
    return jax.lax.conv_general_dilated(
        x, w, attributes["stride"], [(n, n) for n in attributes["padding"]],
        dimension_numbers=("NCHW", "OIHW", "NCHW"), feature_group_count=attributes["groups"],
    )  # fmt: skip


def conv2d_input_grad(w: Array, dy: Array, attributes: Values, outputs: Outputs) -> Array:
    """Gradient of the image; the convolution is linear in it, so that any image will do."""
    image = jnp.zeros(outputs[0].shape, dy.dtype)
    return jax.vjp(lambda x: conv2d(x, w, attributes, outputs), image)[1](dy)[0]


def conv2d_weight_grad(x: Array, dy: Array, attributes: Values, outputs: Outputs) -> Array:
    """Gradient of the kernel, likewise."""
    kernel = jnp.zeros(outputs[0].shape, dy.dtype)
    return jax.vjp(lambda w: conv2d(x, w, attributes, outputs), kernel)[1](dy)[0]


def pool2d(x: Array, attributes: Values, outputs: Outputs) -> Array:
    """Largest or mean element of each window."""
    window = partial(
        jax.lax.reduce_window, window_dimensions=(1, 1, *attributes["kernel"]),
        window_strides=(1, 1, *attributes["stride"]), padding=[(0, 0)] * 2 + [(n, n) for n in attributes["padding"]],
    )  # fmt: skip
    if attributes["kind"] == "max":
        return window(x, -jnp.inf, jax.lax.max)
    return window(x, 0.0, jax.lax.add) / prod(attributes["kernel"])


def pool2d_grad(x: Array, dy: Array, attributes: Values, outputs: Outputs) -> Array:
    """Gradient of the image."""
    return jax.vjp(lambda image: pool2d(image, attributes, outputs), x)[1](dy)[0]
