"""The trainable part as a Flax module, whose arrays become the `Parameters` used everywhere else; checkpoints."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from perfmodel.cost.learn._parameters import LAYERED, Parameters, residual
from perfmodel.cost.learn._recipe import Recipe
from perfmodel.ingest.tables import write_bytes
from perfmodel.ops import FAMILIES

_SMALL: Final = nnx.initializers.normal(0.01)
"""One object, so that graphs of equal networks are equal."""


class Residual(nnx.Module):
    """Three hidden layers over features, a stack embedding and per-stack tables along shape axes."""

    def __init__(self, family: str, features: int, stacks: int, recipe: Recipe, *, rngs: nnx.Rngs) -> None:
        axes = FAMILIES[family].axes
        inputs = features + recipe.stack_size + recipe.table_size * len(axes)
        first, second, third = recipe.hidden
        self.first = nnx.Linear(inputs, first, rngs=rngs)
        self.second = nnx.Linear(first, second, rngs=rngs)
        self.third = nnx.Linear(second, third, rngs=rngs)
        self.out = nnx.Linear(third, 1, kernel_init=_SMALL, rngs=rngs)
        self.stacks = nnx.Param(0.3 * rngs.params.normal((stacks, recipe.stack_size)))
        for index, axis in enumerate(axes):
            nodes = int((axis.high - axis.low) * axis.nodes_per_doubling) + 2
            table = 0.02 * rngs.params.normal((stacks, nodes, recipe.table_size))
            setattr(self, f"table_{index}", nnx.Param(table))

    def arrays(self, frozen: Parameters) -> Parameters:
        """`frozen` with this module's weights in place."""
        layers: Any = (self.first, self.second, self.third, self.out)
        count = len(frozen.tables)
        return frozen._replace(
            kernels=tuple(layer.kernel[...] for layer in layers),
            biases=tuple(layer.bias[...] for layer in layers),
            stack_embedding=self.stacks[...],
            tables=tuple(getattr(self, f"table_{i}")[...] for i in range(count)),
        )

    def start_from(self, params: Parameters) -> None:
        """Take over the weights of an earlier training on the same stacks."""
        layers: Any = (self.first, self.second, self.third, self.out)
        for layer, kernel, bias in zip(layers, params.kernels, params.biases, strict=True):
            layer.kernel[...] = jnp.asarray(kernel)
            layer.bias[...] = jnp.asarray(bias)
        self.stacks[...] = jnp.asarray(params.stack_embedding)
        for index, table in enumerate(params.tables):
            getattr(self, f"table_{index}")[...] = jnp.asarray(table)

    def __call__(self, family: str, frozen: Parameters, z: Any, positions: Any, stack: Any) -> Any:
        """Residual [n] of standardised features [n, F]."""
        return residual(jnp, family, self.arrays(frozen), z, positions, stack)


def to_numpy(params: Parameters) -> Parameters:
    """Parameters with NumPy arrays throughout (float32 weights, float64 base constants)."""
    weights = {
        "kernels": tuple(np.asarray(k, np.float32) for k in params.kernels),
        "biases": tuple(np.asarray(b, np.float32) for b in params.biases),
        "stack_embedding": np.asarray(params.stack_embedding, np.float32),
        "tables": tuple(np.asarray(t, np.float32) for t in params.tables),
    }
    rest = {k: np.asarray(v) for k, v in params._asdict().items() if k not in weights}
    return Parameters(**rest, **weights)


def stack_members(members: Sequence[Parameters]) -> Parameters:
    """One set of parameters with the networks of several, which differ in nothing else."""
    several = {
        name: tuple(np.stack(layer) for layer in zip(*(getattr(m, name) for m in members), strict=True))
        for name in LAYERED
    }
    return members[0]._replace(stack_embedding=np.stack([m.stack_embedding for m in members]), **several)


def member(params: Parameters, index: int) -> Parameters:
    """One network of several; of a single one, itself."""
    if params.stack_embedding.ndim == 2:
        return params
    one: dict[str, Any] = {name: tuple(layer[index] for layer in getattr(params, name)) for name in LAYERED}
    return params._replace(stack_embedding=params.stack_embedding[index], **one)


@dataclass(frozen=True)
class Run:
    """How far a training is."""

    identity: int
    """Checksum of targets, recipe and seed."""
    done: int = 0
    best_error: float = float("inf")
    waited: int = 0
    """Checks since the best one."""

    def after(self, step: int, error: float, gained: bool) -> "Run":
        """The run after a check at `step`."""
        if gained:
            return replace(self, done=step, best_error=error, waited=0)
        return replace(self, done=step, waited=self.waited + 1)


def save_run(path: Path, run: Run, tree: Any) -> None:
    """Write a run and its arrays (a pytree) to `path`."""
    leaves: Any = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    meta = np.array([run.identity, run.done, run.best_error, run.waited])
    buffer = io.BytesIO()
    np.savez(buffer, meta=meta, **leaves)
    write_bytes(path, buffer.getvalue())


def load_run(path: Path, identity: int, like: Any) -> tuple[Run, Any] | None:
    """A saved run and its arrays in the structure of `like`; `None` if absent, damaged or another run's."""
    expected = jax.tree.leaves(like)
    try:
        with np.load(path) as file:
            meta = file["meta"]
            leaves = [file[f"leaf_{i}"] for i in range(len(expected))]
    except (OSError, ValueError, KeyError, EOFError):
        return None
    if int(meta[0]) != identity or [a.shape for a in leaves] != [np.shape(a) for a in expected]:
        return None
    run = Run(int(meta[0]), int(meta[1]), float(meta[2]), int(meta[3]))
    return run, jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(a) for a in leaves])
