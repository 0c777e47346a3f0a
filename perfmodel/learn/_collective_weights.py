"""The weights file of the collective models: safetensors with JSON metadata, loaded fail-closed."""

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import CalibrationError
from perfmodel.learn._collective_constants import NAMES, Series

SCHEMA: Final = "perfmodel-collectives/1"
FILE_NAME: Final = "collectives.safetensors"


@dataclass(frozen=True)
class CollectiveWeights:
    """Everything that a fit of collective tables leaves behind."""

    series: tuple[Series, ...]
    reference_sources: tuple[str, ...] = ()
    """Sources timed on the device, best first: what `CollectiveModel.times` stands on."""
    unhealthy: tuple[str, ...] = ()
    """Beginnings of series names whose links between nodes ran far below their nominal rate."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Regressors and corrections, by name."""
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON values: features, seeds, hashes of the tables, measured errors."""


def save_collective_weights(weights: CollectiveWeights, path: Path) -> None:
    """Write `path` atomically."""
    from safetensors.numpy import save

    from perfmodel.io import write_bytes

    meta = {
        "schema": SCHEMA,
        "constants": list(NAMES),
        "reference_sources": list(weights.reference_sources),
        "unhealthy": list(weights.unhealthy),
        "series": [[s.name, list(s.ranks), list(s.ranks_between)] for s in weights.series],
        "notes": weights.notes,
    }
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.arrays.items()}
    arrays["series/vector"] = np.array([s.vector for s in weights.series], np.float64).reshape(-1, len(NAMES))
    arrays["series/bytes"] = np.array([[s.low_bytes, s.high_bytes] for s in weights.series]).reshape(-1, 2)
    write_bytes(path, save(arrays, {"perfmodel": json.dumps(meta, sort_keys=True)}))


def load_collective_weights(calibration: Path | None = None) -> CollectiveWeights:
    """Read the shipped weights, or `collectives.safetensors` of a calibration folder (or that file itself).

    Raises:
        CalibrationError: if the file is missing, truncated, or of another schema version.
    """
    from safetensors import SafetensorError, safe_open

    if calibration is None:
        path = Path(str(files("perfmodel.learn") / "weights" / FILE_NAME))
    else:
        path = Path(calibration)
        path = path / FILE_NAME if path.suffix != ".safetensors" else path
    if not path.is_file():
        raise CalibrationError(f"{path}: no such calibration; make one with `perfmodel fit TABLE --out DIR`")
    try:
        with safe_open(str(path), framework="numpy") as handle:
            meta = json.loads((handle.metadata() or {}).get("perfmodel", "{}"))
            arrays = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CalibrationError(f"{path}: truncated or not a weights file ({error}); fit it again") from None
    if meta.get("schema") != SCHEMA or meta.get("constants") != list(NAMES):
        raise CalibrationError(f"{path}: schema {meta.get('schema')!r} is not {SCHEMA!r} of this version; fit it again")
    try:
        vectors, ranges = arrays.pop("series/vector"), arrays.pop("series/bytes")
        series = tuple(
            Series(name, vectors[i], tuple(ranks), tuple(between), float(ranges[i, 0]), float(ranges[i, 1]))
            for i, (name, ranks, between) in enumerate(meta["series"])
        )
    except (KeyError, IndexError, ValueError) as error:
        raise CalibrationError(f"{path}: incomplete weights file ({error}); fit it again") from None
    return CollectiveWeights(
        series=series,
        reference_sources=tuple(meta["reference_sources"]),
        unhealthy=tuple(meta["unhealthy"]),
        arrays=arrays,
        notes=meta["notes"],
    )
