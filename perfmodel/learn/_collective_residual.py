"""The pooled residual: one small Flax network per collective kind, over what every machine shares.

It corrects the shape of the physical curve (knees, protocol changes) where nothing was measured; a shrinkage
chosen on devices left out says how much of it to believe there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfmodel.learn._collective_curve import LinkConstants
from perfmodel.learn._collective_links import link_class
from perfmodel.learn._collective_table import CollectiveRows

WIDTH: Final = 32
STEPS: Final = 600
LEARNING_RATE: Final = 3e-3
WEIGHT_DECAY: Final = 1e-3
MIN_POINTS: Final = 200
MIN_MACHINES: Final = 4
SHRINKAGES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
CLIP: Final = 1.0
"""Log residuals beyond this are measurement accidents, not physics."""


@dataclass(frozen=True)
class ResidualNet:
    """Weights of one trained network: standardise, two tanh layers, a linear one."""

    mean: np.ndarray
    scale: np.ndarray
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    """Kernel [in, out] and bias [out] of each layer."""
    shrinkage: float

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Expected log residual, float64[n], of features float64[n, k] clipped to the training range."""
        x = np.clip((features - self.mean) / self.scale, -2.5, 2.5)
        for kernel, bias in self.layers[:-1]:
            x = np.tanh(x @ kernel + bias)
        kernel, bias = self.layers[-1]
        return self.shrinkage * np.clip((x @ kernel + bias)[:, 0], -CLIP, CLIP)

    def arrays(self) -> dict[str, np.ndarray]:
        """Named arrays for the weights file."""
        result = {"mean": self.mean, "scale": self.scale, "shrinkage": np.array([self.shrinkage])}
        for i, (kernel, bias) in enumerate(self.layers):
            result |= {f"kernel{i}": kernel, f"bias{i}": bias}
        return result

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "ResidualNet":
        """Inverse of `arrays`."""
        count = sum(name.startswith("kernel") for name in arrays)
        layers = tuple((arrays[f"kernel{i}"], arrays[f"bias{i}"]) for i in range(count))
        return cls(arrays["mean"], arrays["scale"], layers, float(arrays["shrinkage"][0]))


def residual_features(rows: CollectiveRows, constants: LinkConstants, curve_s: np.ndarray) -> np.ndarray:
    """Features float64[n, 8]: sizes, ranks, nodes, how far latency or transfer rules, the link's class."""
    names, inverse = np.unique(rows.series.astype(str), return_inverse=True)
    nominal = np.array(
        [link_class(name.split("|")[2], name.split("|")[1], False).bandwidth_bytes_per_s for name in names]
    )[inverse]
    ones = np.ones(len(rows))
    columns = [
        np.log2(rows.buffer_bytes),
        np.log2(rows.ranks),
        np.log2(rows.buffer_bytes / rows.ranks),
        np.log2(np.maximum(rows.ranks / rows.ranks_per_node, 1.0)),
        np.log(curve_s / (constants.launch_s + constants.hop_intra_s) * ones),
        np.log(rows.buffer_bytes / (constants.bandwidth_intra * curve_s) * ones),
        np.log(nominal),
        np.asarray(constants.peer_exponent) * ones,
    ]
    return np.stack(columns, axis=1)


def fit_residual(
    features: np.ndarray, residual: np.ndarray, weight: np.ndarray, machine: np.ndarray, seed: int
) -> ResidualNet | None:
    """Train on log residuals; `None` where the table is too small or too uniform to pool anything.

    The shrinkage minimises the weighted absolute error on machines left out, in three folds.
    """
    machines = np.unique(machine.astype(str))
    if len(residual) < MIN_POINTS or len(machines) < MIN_MACHINES:
        return None
    target = np.clip(residual, -CLIP, CLIP)
    fold_of = np.random.default_rng(seed).permutation(len(machines)) % 3
    fold = fold_of[np.searchsorted(machines, machine.astype(str))]
    left_out = np.zeros(len(target))
    for k in range(3):
        net = _train(features[fold != k], target[fold != k], weight[fold != k], seed)
        left_out[fold == k] = net.predict(features[fold == k])
    errors = [float(weight @ np.abs(target - s * left_out)) for s in SHRINKAGES]
    best = SHRINKAGES[int(np.argmin(errors))]
    net = _train(features, target, weight, seed)
    return ResidualNet(net.mean, net.scale, net.layers, best)


def _train(features: np.ndarray, target: np.ndarray, weight: np.ndarray, seed: int) -> ResidualNet:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, inputs: int, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(inputs, WIDTH, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(jnp.tanh(self.second(jnp.tanh(self.first(x)))))[:, 0]

    mean, scale = features.mean(0), features.std(0) + 1e-6
    x = jnp.asarray(np.clip((features - mean) / scale, -2.5, 2.5), jnp.float32)
    y, w = jnp.asarray(target, jnp.float32), jnp.asarray(weight / weight.sum(), jnp.float32)
    graph, state = nnx.split(Net(features.shape[1], nnx.Rngs(seed)))
    optimizer = optax.adamw(optax.cosine_decay_schedule(LEARNING_RATE, STEPS), weight_decay=WEIGHT_DECAY)

    def loss(parameters: Any) -> jax.Array:
        error = nnx.merge(graph, parameters)(x) - y
        return jnp.sum(w * jnp.sqrt(error**2 + 1e-3))

    @jax.jit
    def train(parameters: Any) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            parameters, moments = carry
            updates, moments = optimizer.update(jax.grad(loss)(parameters), moments, parameters)
            return (optax.apply_updates(parameters, updates), moments), None

        return jax.lax.scan(step, (parameters, optimizer.init(parameters)), None, length=STEPS)[0][0]

    net = nnx.merge(graph, train(state))
    layers = tuple(
        (np.asarray(layer["kernel"][...], np.float64), np.asarray(layer["bias"][...], np.float64))
        for layer in (nnx.state(getattr(net, name)) for name in ("first", "second", "last"))
    )
    return ResidualNet(mean, scale, layers, 1.0)
