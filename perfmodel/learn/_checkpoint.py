"""Checkpoints of a training: written atomically, resumed only by the very same run."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perfmodel.io import write_bytes


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
