"""Models as lists of small layers, so that passes can be divided anywhere.

A layer is cut so finely (product, activation, attention) that its input is all that a framework
would save: the backward of a layer with newer weights then computes what the framework would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError

Params = Any
"""A pytree of arrays."""
Apply = Callable[[Params, Array, tuple[Any, ...]], tuple[Array, Any]]


@dataclass(frozen=True)
class Layer:
    """`apply(params, x, context) -> (y, left)`; `left` is the context of later slices."""

    name: str
    apply: Apply
    initial: Callable[[np.random.Generator], Params]
    """Initial parameters, in double precision."""


@dataclass(frozen=True)
class LayeredModel:
    """Layers in order, and the loss of a micro-batch."""

    layers: tuple[Layer, ...]
    loss: Callable[[Array, Array], Array]
    """(output, target) -> mean over the micro-batch's examples."""

    def initial(self, seed: int) -> list[Params]:
        """Initial parameters of every layer."""
        rng = np.random.default_rng(seed)
        return [layer.initial(rng) for layer in self.layers]

    def output(self, params: Sequence[Params], x: Array) -> Array:
        """Output for whole sequences, by parameters of every layer."""
        for layer, layer_params in zip(self.layers, params, strict=True):
            x, _ = layer.apply(layer_params, x, ())
        return x

    def stages(self, n: int) -> list[range]:
        """Layers of each of n stages, dealt out as evenly as can be.

        Raises:
            PerfModelError: fewer layers than stages.
        """
        if n > len(self.layers):
            raise PerfModelError(
                f"{len(self.layers)} layers are too few for {n} stages; use a deeper model"
            )
        # Rounding down spreads the remainder over the stages.
        bounds = [len(self.layers) * i // n for i in range(n + 1)]
        return [range(a, b) for a, b in pairwise(bounds)]


# `apply` is static: a layer compiles once per shape, however many passes and versions of weights
# use it.
@partial(jax.jit, static_argnums=0)
def forward(apply: Apply, params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, Any]:
    """Forward pass of a layer: its output, and its context for later slices."""
    return apply(params, x, context)


@partial(jax.jit, static_argnums=0)
def input_gradient(
    apply: Apply, params: Params, x: Array, context: tuple[Any, ...], cotangent: tuple[Array, Any]
) -> tuple[Array, tuple[Any, ...]]:
    """Gradients with respect to a layer's input and context."""
    return jax.vjp(partial(apply, params), x, context)[1](cotangent)


@partial(jax.jit, static_argnums=0)
def weight_gradient(
    apply: Apply, params: Params, x: Array, context: tuple[Any, ...], cotangent: tuple[Array, Any]
) -> Params:
    """Gradient with respect to a layer's parameters."""
    return jax.vjp(lambda p: apply(p, x, context), params)[1](cotangent)[0]


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(
    loss: Callable[[Array, Array], Array], y: Array, target: Array
) -> tuple[Array, Array]:
    """Loss of a micro-batch, and its gradient with respect to the output."""
    return jax.value_and_grad(loss)(y, target)


def sequential_gradients(
    model: LayeredModel,
    params: list[Params],
    inputs: Float[ArrayLike, "..."],
    targets: Float[ArrayLike, "..."],
) -> tuple[float, list[Params]]:
    """Mean loss and gradient over all micro-batches, whole sequences, one device: the reference.

    Args:
        model: the model.
        params: parameters of every layer.
        inputs, targets: arrays whose first axis counts micro-batches.
    """

    # All micro-batches at once, by vmap and autodiff: nothing here knows of stages, so it can check
    # what does.
    def mean_loss(parameters: list[Params]) -> Array:
        def micro_batch_loss(x: Array, target: Array) -> Array:
            return model.loss(model.output(parameters, x), target)

        return jnp.mean(jax.vmap(micro_batch_loss)(jnp.asarray(inputs), jnp.asarray(targets)))

    value, gradient = jax.value_and_grad(mean_loss)(params)
    return float(value), gradient


def mlp_model(width: int, depth: int) -> LayeredModel:
    """`depth` pairs of a dense layer and a tanh, with squared error."""
    dense = Layer("dense", _dense, partial(_dense_initial, width))
    return LayeredModel((dense, Layer("tanh", _tanh, _nothing)) * depth, _squared_error)


def conv_model(channels: Sequence[int], size: int, classes: int) -> LayeredModel:
    """3x3 convolutions with ReLU, a mean pooling that halves the image after every two, and a dense
    layer; softmax cross-entropy.

    Args:
        channels: channels of the input, then of the output of each convolution.
        size: width and height of the images [batch, size, size, channels].
        classes: columns of the output, and of the targets (one-hot).
    """
    # Product, activation and pooling are layers of their own, so stages may be cut between them.
    layers: list[Layer] = []
    for i, (c_in, c_out) in enumerate(pairwise(channels)):
        layers += [
            Layer(f"conv {i}", _conv, partial(_conv_initial, c_in, c_out)),
            Layer("relu", _relu, _nothing),
        ]
        if i % 2:
            layers.append(Layer("pool", _pool, _nothing))
            size //= 2
    head = partial(_head_initial, size * size * channels[-1], classes)
    return LayeredModel(
        (*layers, Layer("flatten", _flatten, _nothing), Layer("head", _dense, head)), _cross_entropy
    )


def causal_model(width: int, depth: int) -> LayeredModel:
    """`depth` times causal single-head attention, dense, tanh, on [batch, tokens, width]."""
    attention = Layer("attention", _attention, partial(_attention_initial, width))
    dense = Layer("dense", _dense, partial(_dense_initial, width))
    return LayeredModel((attention, dense, Layer("tanh", _tanh, _nothing)) * depth, _squared_error)


def _nothing(rng: np.random.Generator) -> Params:
    return ()


def _dense_initial(width: int, rng: np.random.Generator) -> Params:
    return {"w": rng.normal(size=(width, width)) / width**0.5, "b": np.zeros(width)}


def _conv_initial(c_in: int, c_out: int, rng: np.random.Generator) -> Params:
    # He et al. 2015: ReLUs halve the variance, which the weights make up for.
    deviation = (2 / (9 * c_in)) ** 0.5
    return {"w": rng.normal(size=(3, 3, c_in, c_out)) * deviation, "b": np.zeros(c_out)}


def _head_initial(inputs: int, classes: int, rng: np.random.Generator) -> Params:
    return {"w": rng.normal(size=(inputs, classes)) / inputs**0.5, "b": np.zeros(classes)}


def _attention_initial(width: int, rng: np.random.Generator) -> Params:
    return {name: rng.normal(size=(width, width)) / width**0.5 for name in ("q", "k", "v")}


def _dense(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    return x @ params["w"] + params["b"], None


def _tanh(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    return jnp.tanh(x), None


def _conv(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, params["w"], (1, 1), "SAME", dimension_numbers=layout)
    return y + params["b"], None


def _relu(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    return jnp.maximum(x, 0), None


def _pool(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4)), None


def _flatten(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, None]:
    return x.reshape(len(x), -1), None


def _attention(params: Params, x: Array, context: tuple[Any, ...]) -> tuple[Array, Any]:
    """Causal attention of a slice; returns the result, and keys and values for later slices."""
    # A slice of a sequence attends to the keys and values of the slices before it, and to its own.
    # Keys and values are what a slice leaves for later ones; their gradient comes back as the
    # context's cotangent.
    own_keys, own_values = x @ params["k"], x @ params["v"]
    earlier_keys, earlier_values = _columns(context)
    keys = jnp.concatenate([*earlier_keys, own_keys], axis=-2)
    values = jnp.concatenate([*earlier_values, own_values], axis=-2)
    scores = (x @ params["q"]) @ jnp.swapaxes(keys, -1, -2) / x.shape[-1] ** 0.5
    # Queries are the last positions of the keys, so query i sees all keys of earlier slices and its
    # own up to i.
    n_keys, n_queries = keys.shape[-2], x.shape[-2]
    last_seen = n_keys - n_queries + jnp.arange(n_queries)
    is_seen = jnp.arange(n_keys)[None, :] <= last_seen[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1)
    return x + weights @ values, (own_keys, own_values)


def _columns(context: tuple[Any, ...]) -> tuple[list[Array], list[Array]]:
    """Keys and values of the slices before."""
    return [keys for keys, _ in context], [values for _, values in context]


def _squared_error(y: Array, target: Array) -> Array:
    return jnp.mean((y - target) ** 2)


def _cross_entropy(y: Array, target: Array) -> Array:
    return -jnp.mean((target * jax.nn.log_softmax(y)).sum(axis=-1))
