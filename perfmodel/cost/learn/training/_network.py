"""The trainable part as a Flax module, whose arrays become the `Parameters` used everywhere else;
checkpoints."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from perfmodel.cost.learn.parameters import LAYERED, Parameters, residual
from perfmodel.cost.learn.training._recipe import Recipe
from perfmodel.ingest.tables import write_bytes
from perfmodel.ops import FAMILIES

_SMALL: Final = nnx.initializers.normal(0.01)
"""One object, so that graphs of equal networks are equal."""


class Residual(nnx.Module):
    """Three hidden layers over features, a stack embedding and per-stack tables along shape
    axes."""

    def __init__(
        self, family: str, features: int, stacks: int, recipe: Recipe, *, rngs: nnx.Rngs
    ) -> None:
        axes = FAMILIES[family].axes
        inputs = features + recipe.stack_size + recipe.table_size * len(axes)
        first, second, third = recipe.hidden
        self.first = nnx.Linear(inputs, first, rngs=rngs)
        self.second = nnx.Linear(first, second, rngs=rngs)
        self.third = nnx.Linear(second, third, rngs=rngs)
        self.out = nnx.Linear(third, 1, kernel_init=_SMALL, rngs=rngs)
        self.stacks = nnx.Param(0.3 * rngs.params.normal((stacks, recipe.stack_size)))
        for index, axis in enumerate(axes):
            # both ends, and one beyond, as `residual` reads the node above a shape too
            nodes = int((axis.high - axis.low) * axis.nodes_per_doubling) + 2
            table = 0.02 * rngs.params.normal((stacks, nodes, recipe.table_size))
            setattr(self, f"table_{index}", nnx.Param(table))

    def arrays(self, frozen: Parameters) -> Parameters:
        """Put this module's weights into `frozen`."""
        # base constants and scaling are not trained: they are handed in and handed on
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


def stack_members(members: Sequence[Parameters]) -> Parameters:
    """Stack the networks of several trained members into one set of arrays; the rest comes from the
    first member."""
    networks = [_network(member) for member in members]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *networks)
    return members[0]._replace(**stacked)


def member(params: Parameters, index: int) -> Parameters:
    """Select one network of an ensemble; a single network is returned unchanged."""
    if params.stack_embedding.ndim == 2:
        return params
    return params._replace(**jax.tree.map(lambda array: array[index], _network(params)))


def _network(params: Parameters) -> dict[str, Any]:
    """Fields in which the members of an ensemble differ."""
    return {name: getattr(params, name) for name in (*LAYERED, "stack_embedding")}


@dataclass(frozen=True)
class Run:
    """State of a training run."""

    identity: int
    """Checksum of targets, recipe and seed."""
    done: int = 0
    """Number of training steps that are done."""
    best_error: float = float("inf")
    """Lowest mean error at a check."""
    waited: int = 0
    """Checks since the best one."""

    def after(self, step: int, error: float, gained: bool) -> "Run":
        """The run after a check at `step`."""
        if gained:
            return replace(self, done=step, best_error=error, waited=0)
        return replace(self, done=step, waited=self.waited + 1)


def save_run(path: Path, run: Run, tree: Any) -> None:
    """Write a run and its arrays (a pytree) to `path`."""
    # the format knows no trees: leaves by number, in the order of the structure
    leaves: Any = {f"leaf_{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    meta = np.array([run.identity, run.done, run.best_error, run.waited])
    buffer = io.BytesIO()
    np.savez(buffer, meta=meta, **leaves)
    write_bytes(path, buffer.getvalue())


def load_run(path: Path, identity: int, template: Any) -> tuple[Run, Any] | None:
    """Load a saved run and its arrays; `None` if absent, damaged or from another run."""
    expected = jax.tree.leaves(template)
    # with any error in a checkpoint, the training starts again
    try:
        with np.load(path) as file:
            meta = file["meta"]
            leaves = [file[f"leaf_{i}"] for i in range(len(expected))]
    except (OSError, ValueError, KeyError, EOFError):
        return None
    have_shapes_of_run = [leaf.shape for leaf in leaves] == [np.shape(leaf) for leaf in expected]
    if int(meta[0]) != identity or not have_shapes_of_run:
        return None
    run = Run(int(meta[0]), int(meta[1]), float(meta[2]), int(meta[3]))
    return run, jax.tree.unflatten(jax.tree.structure(template), [jnp.asarray(a) for a in leaves])
