"""Summaries of pipelines for searches: live memory on ranks and bounding paths, without building
programs.

Both follow from the order of a schedule alone. Summaries are kept on disk, where searches of other
sessions find them.
"""

import hashlib
import io
import zipfile
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.ingest.tables import write_atomic
from perfmodel.prediction._paths import (
    Paths,
    cycles,
    flushed_paths,
    joined,
    steady_paths,
    undominated,
)
from perfmodel.program import ProgramSpec
from perfmodel.schedule import leading_layers
from perfmodel.schedule.memory import LiveState, live_state
from perfmodel.session import (
    cache_folder,
    cache_limit_bytes,
    code_digest,
    drop_least_recently_used,
    mark_used,
)

_N_SIZES: Final = 7
"""Number of sizes that precede the arrays of an encoded pipeline."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Relevant ranks and paths of a program, for a model's blocks."""

    live: LiveState
    """Ranks that may be the fullest."""
    paths: Paths
    """Paths that may be the longest."""

    def encoded(self) -> Float[np.ndarray, " values"]:
        """Encode all arrays in sequence, after their sizes."""
        n_paths, n_variants, n_stages, _ = self.paths.passes.shape
        live, paths = self.live, self.paths
        sizes = (*live.stage.shape, n_paths, n_variants, n_stages, live.replicas, live.split)
        arrays = (
            live.stage,
            live.activations,
            live.versions,
            live.warm_up,
            paths.passes,
            paths.sends,
            paths.variants,
            paths.transit,
            paths.cycle,
        )
        # A file on disk holds one array: sizes tell where each of the others begins.
        flat = [np.asarray(array, float).reshape(-1) for array in arrays]
        return np.concatenate([np.array(sizes, float), *flat])

    @classmethod
    def decoded(cls, values: Float[np.ndarray, " values"]) -> "Pipeline":
        """The pipeline of `encoded` values."""
        ranks, chunks, paths, variants, stages, replicas, split = (
            values[:_N_SIZES].astype(int).tolist()
        )
        remaining = values[_N_SIZES:]

        def take(*shape: int) -> Float[np.ndarray, "..."]:
            nonlocal remaining
            array, remaining = np.split(remaining, [prod(shape)])
            return array.reshape(shape)

        # In the order in which `encoded` writes them.
        live = LiveState(
            stage=take(ranks, chunks).astype(int),
            activations=take(ranks, chunks),
            versions=take(ranks).astype(int),
            warm_up=take(ranks).astype(int),
            replicas=replicas,
            split=bool(split),
        )
        return cls(
            live,
            Paths(
                passes=take(paths, variants, stages, 3),
                sends=take(paths, 2, stages),
                variants=take(variants, 3).astype(int),
                transit=take(paths, variants, stages, 3),
                cycle=take(paths),
            ),
        )


def summarise(
    spec: ProgramSpec,
    counts: Float[np.ndarray, "stages blocks"],
    layers: Bool[np.ndarray, " blocks"],
) -> Pipeline:
    """Summarise a program whose stages hold some blocks.

    Args:
        counts: blocks of every stage.
        layers: which blocks are layers.
    """
    schedule = spec.build_schedule()
    live = live_state(schedule, spec.offload, spec.scheduler.weights)
    combines = spec.combines_passes
    if spec.steps == 1:
        paths = flushed_paths(schedule, combines)
    else:
        paths = steady_paths(schedule, spec.steps, combines)
    if spec.scheduler.staggered and spec.steps > 1:
        paths = joined(paths, cycles(replace(spec, steps=1).build_schedule(), spec.steps, combines))

    # The fullest rank: bytes are sums over blocks with weights that are not known yet, but not
    # negative. A rank that holds no more than another of anything is never fuller, however many
    # layers are recomputed in full.
    most_layers = 0 if spec.is_forward_only else int(counts[:, layers].sum(axis=1).max(initial=0.0))
    on_rank = counts[live.stage].sum(axis=1)
    features = [on_rank, on_rank * live.versions[:, None]]
    for n in range(most_layers + 1):
        full = leading_layers(counts, layers, np.array([n]))
        for part in (full, counts - full):
            features.append((part[live.stage] * live.activations[..., None]).sum(axis=1))
        features.append(full[live.stage].sum(axis=1) > 0)
    ranks = undominated(np.concatenate(features, axis=1))
    live = replace(
        live,
        stage=live.stage[ranks],
        activations=live.activations[ranks],
        versions=live.versions[ranks],
        warm_up=live.warm_up[ranks],
    )

    # So is the longest path: its seconds are a sum of passes and transfers with weights that are
    # not negative. Where steps run into each other the bound takes differences of paths, so that
    # all of them count.
    if spec.steps == 1:
        work = np.einsum("kvsp,sb->kvpb", paths.passes, counts).reshape(len(paths.passes), -1)
        paths = paths.only(
            undominated(np.concatenate([work, paths.sends.reshape(len(work), -1)], axis=1))
        )
    return Pipeline(live, paths)


@dataclass(eq=False)
class PipelineCache:
    """A disk cache of pipelines, one file per schedule and division of a model into blocks."""

    directory: Path = field(default_factory=lambda: cache_folder("pipelines"))
    """Folder of the files."""
    _known: dict[Path, dict[str, Float[np.ndarray, " values"]]] = field(default_factory=dict)
    """Encoded pipelines of each file that was read, by key."""
    _new: set[Path] = field(default_factory=set)
    """Files for which memory holds more pipelines than the disk."""

    def get(
        self,
        spec: ProgramSpec,
        counts: Float[np.ndarray, "stages blocks"],
        layers: Bool[np.ndarray, " blocks"],
        model: Hashable,
    ) -> Pipeline:
        """The summary of a pipeline (`summarise`), from disk if available.

        Args:
            model: stands for the blocks of the whole model.
        """
        # Schedules that a caller made may be others next time: they are not kept.
        if spec.digest is None:
            return summarise(spec, counts, layers)
        path = self.directory / _file_name(spec.schedule, spec.digest, model)
        if path not in self._known:
            self._known[path] = _load(path)
        known = self._known[path]
        key = (
            f"{spec.stages} {spec.micro_batches} {spec.chunks} {spec.steps} {spec.offload} {spec.forward_only} "
            f"{spec.combines_passes}"
        )
        if key not in known:
            known[key] = summarise(spec, counts, layers).encoded()
            self._new.add(path)
        return Pipeline.decoded(known[key])

    def save(self) -> None:
        """Save new entries; errors are ignored."""
        # Threads that search the same problem share this object.
        changed = tuple(self._new)
        for path in changed:
            # Another process may have written the file since it was read: what both know is joined.
            entries = _load(path) | self._known[path]
            ends = np.cumsum([len(values) for values in entries.values()])
            arrays = {
                "keys": np.array(list(entries)),
                "ends": ends,
                "values": np.concatenate(list(entries.values())),
            }
            try:
                write_atomic(path, lambda file, a=arrays: file.write(_npz(a)))
            except OSError:
                return
        if changed:
            drop_least_recently_used(self.directory, cache_limit_bytes("pipelines"))
        self._new.difference_update(changed)


CODE: Final = (
    "perfmodel.schedule",
    "perfmodel.program",
    "perfmodel.prediction._paths",
    "perfmodel.prediction._pipeline",
)
"""Modules that determine pipelines; files written by another version of them are ignored."""


def _file_name(schedule: str, digest: str, model: Hashable) -> str:
    """Name of the file with the pipelines of a schedule and a model, made by this code."""
    key = f"{code_digest(*CODE)} {schedule} {digest} {model}"
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def _load(path: Path) -> dict[str, Float[np.ndarray, " values"]]:
    """Read a file of `PipelineCache.save`; empty if its content is anything else."""
    try:
        with np.load(path) as file:
            parts = np.split(file["values"], file["ends"][:-1])
            mark_used(path)
            return dict(zip(file["keys"].tolist(), parts, strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
