"""What a search needs to know of a pipeline without building its program: memory alive, and bounding paths."""

import hashlib
import io
import zipfile
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.ingest.tables import drop_least_recently_used, mark_used, write_atomic
from perfmodel.prediction._paths import Paths, cycles, flushed_paths, joined, steady_paths, undominated
from perfmodel.prediction._stages import leading_layers
from perfmodel.program import ProgramSpec
from perfmodel.schedule import Phase, Schedule, alive_at_peak, offloaded_at_peak, weight_versions
from perfmodel.timeline import cache_dir, cache_limit_bytes, code_digest


@dataclass(frozen=True, eq=False)
class LiveState:
    """Decided by the order of events alone."""

    stage: Int[np.ndarray, "ranks chunks"]
    """Global stage of every chunk."""
    activations: Float[np.ndarray, "ranks chunks"]
    """Micro-batches alive when the rank holds most."""
    versions: Int[np.ndarray, " ranks"]
    """Weight versions held at once."""
    warm_up: Int[np.ndarray, " ranks"]
    """Forwards before the rank's first backward."""
    replicas: int
    """Ranks that hold the same stage."""
    split: bool
    """Whether gradients of weights are passes of their own, which nothing but the step's end waits for."""


def live_state(spec: ProgramSpec, schedule: Schedule) -> LiveState:
    """The live state of a program and its schedule."""
    alive = offloaded_at_peak(schedule) if spec.offload else alive_at_peak(schedule)
    versions = weight_versions(schedule, spec.scheduler.weights).stored
    forward = schedule.phase == Phase.FORWARD
    warm_up = [
        int(np.append(forward[first:end], False).argmin())
        for first, end in zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)
    ]
    split = bool((schedule.phase == Phase.BACKWARD_WEIGHT).any())
    return LiveState(schedule.stage, alive / schedule.slices, versions, np.array(warm_up), schedule.replicas, split)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Ranks and paths of a program, without those that others make irrelevant for a model's blocks."""

    live: LiveState
    """Ranks that may be the fullest."""
    paths: Paths
    """Paths that may be the longest."""

    def encoded(self) -> Float[np.ndarray, " values"]:
        """All arrays, one after another behind their sizes."""
        n_paths, n_variants, n_stages, _ = self.paths.passes.shape
        live = self.live
        sizes = (*live.stage.shape, n_paths, n_variants, n_stages, live.replicas, live.split)
        arrays = (live.stage, live.activations, live.versions, live.warm_up, *vars(self.paths).values())
        return np.concatenate([np.array(sizes, float), *(np.asarray(a, float).reshape(-1) for a in arrays)])

    @classmethod
    def decoded(cls, values: Float[np.ndarray, " values"]) -> "Pipeline":
        """The pipeline of `encoded` values."""
        ranks, chunks, paths, variants, stages, replicas, split = values[:7].astype(int).tolist()
        shapes = (
            (ranks, chunks), (ranks, chunks), (ranks,), (ranks,), (paths, variants, stages, 3), (paths, 2, stages),
            (variants, 3), (paths, variants, stages, 3), (paths,),
        )  # fmt: skip
        ends = [*accumulate(map(prod, shapes), initial=7)]
        stage, alive, versions, warm_up, passes, sends, table, transit, cycle = (
            values[start:end].reshape(shape) for (start, end), shape in zip(pairwise(ends), shapes, strict=True)
        )
        live = LiveState(stage.astype(int), alive, versions.astype(int), warm_up.astype(int), replicas, bool(split))
        return cls(live, Paths(passes, sends, table.astype(int), transit, cycle))


def summarise(
    spec: ProgramSpec, counts: Float[np.ndarray, "stages blocks"], layers: Bool[np.ndarray, " blocks"]
) -> Pipeline:
    """The pipeline of a program whose stages hold the blocks counted (`layers` marks those that are layers)."""
    schedule = spec.build_schedule()
    live = live_state(spec, schedule)
    combines = spec.combines_passes
    paths = flushed_paths(schedule, combines) if spec.steps == 1 else steady_paths(schedule, spec.steps, combines)
    if spec.scheduler.staggered and spec.steps > 1:
        paths = joined(paths, cycles(replace(spec, steps=1).build_schedule(), spec.steps, combines))
    most = 0 if spec.is_forward_only else int(counts[:, layers].sum(axis=1).max(initial=0.0))
    features = [
        counts[live.stage].sum(axis=1),
        counts[live.stage].sum(axis=1) * live.versions[:, None],
    ]
    for n in range(most + 1):
        full = leading_layers(counts, layers, np.array([n]))
        features += [(part[live.stage] * live.activations[..., None]).sum(axis=1) for part in (full, counts - full)]
        features.append(full[live.stage].sum(axis=1) > 0)
    ranks = undominated(np.concatenate(features, axis=1))
    if spec.steps == 1:
        work = np.einsum("kvsp,sb->kvpb", paths.passes, counts).reshape(len(paths.passes), -1)
        kept = undominated(np.concatenate([work, paths.sends.reshape(len(work), -1)], axis=1))
        parts = ("passes", "sends", "transit", "cycle")
        paths = replace(paths, **{name: getattr(paths, name)[kept] for name in parts})
    kept = {name: getattr(live, name)[ranks] for name in ("stage", "activations", "versions", "warm_up")}
    return Pipeline(replace(live, **kept), paths)


@dataclass(eq=False)
class PipelineCache:
    """Pipelines on disk, a file per schedule and division of a model into blocks."""

    directory: Path = field(default_factory=lambda: cache_dir() / "pipelines")
    _known: dict[Path, dict[str, Float[np.ndarray, " values"]]] = field(default_factory=dict)
    _new: set[Path] = field(default_factory=set)

    def get(
        self,
        spec: ProgramSpec,
        counts: Float[np.ndarray, "stages blocks"],
        layers: Bool[np.ndarray, " blocks"],
        model: Hashable,
    ) -> Pipeline:
        """`summarise`, unless it is known; `model` stands for the blocks of the whole model.

        Schedules of the caller's own, which may be others next time, are not kept.
        """
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
        """Write what is new; a cache that cannot be written is done without."""
        for path in self._new:
            entries = _load(path) | self._known[path]
            ends = np.cumsum([len(values) for values in entries.values()])
            arrays = {"keys": np.array(list(entries)), "ends": ends, "values": np.concatenate(list(entries.values()))}
            try:
                write_atomic(path, lambda file, a=arrays: file.write(_npz(a)))
            except OSError:
                return
        if self._new:
            drop_least_recently_used(self.directory, cache_limit_bytes("pipelines"))
        self._new.clear()


CODE: Final = (
    "perfmodel.schedule",
    "perfmodel.program",
    *(f"perfmodel.prediction.{module}" for module in ("_paths", "_pipeline", "_stages")),
)
"""What pipelines follow from."""


def _file_name(schedule: str, digest: str, model: Hashable) -> str:
    return hashlib.sha256(f"{code_digest(*CODE)} {schedule} {digest} {model}".encode()).hexdigest()[:32] + ".npz"


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def _load(path: Path) -> dict[str, Float[np.ndarray, " values"]]:
    """What `PipelineCache.save` wrote; nothing where the file is not exactly that."""
    try:
        with np.load(path) as file:
            parts = np.split(file["values"], file["ends"][:-1])
            mark_used(path)
            return dict(zip(file["keys"].tolist(), parts, strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
