"""The weights file of the collective models: safetensors with JSON metadata, loaded fail-closed."""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import CalibrationError
from perfmodel.learn import _collective_correction as collective
from perfmodel.learn import _moe_alltoall as moe
from perfmodel.learn._collective_constants import NAMES, Series
from perfmodel.learn._collective_residual import ResidualNet
from perfmodel.learn._collective_weights import CollectiveWeights, Corrected, MoeWeights, ReferenceGrid
from perfmodel.learn._fine_tables import FineTables
from perfmodel.learn._kriging import Component
from perfmodel.learn._kriging_store import kriging_arrays, kriging_of
from perfmodel.learn._library import END_TO_END_FILE
from perfmodel.learn._local_intervals import LocalErrors

SCHEMA: Final = "perfmodel-collectives/2"
FILE_NAME: Final = "collectives.safetensors"


def save_collective_weights(weights: CollectiveWeights, path: Path) -> None:
    """Write `path` atomically."""
    from safetensors.numpy import save

    from perfmodel.io import write_bytes

    arrays: dict[str, np.ndarray] = {
        "series/vector": np.array([s.vector for s in weights.series], np.float64).reshape(-1, len(NAMES)),
        "series/bytes": np.array([[s.low_bytes, s.high_bytes] for s in weights.series]).reshape(-1, 2),
        "moe/vector": np.array(list(weights.moe.series.values()), np.float64).reshape(-1, len(moe.moe_prior("|||"))),
    }
    for kind, net in weights.nets.items():
        arrays |= {f"net/{kind}/{name}": value for name, value in net.arrays().items()}
    for i, grid in enumerate(weights.grids.values()):
        arrays |= {f"grid/{i}/ranks": grid.ranks, f"grid/{i}/size": grid.size, f"grid/{i}/fix": grid.correction}
    meta = {
        "schema": SCHEMA,
        "constants": list(NAMES),
        "reference_sources": list(weights.reference_sources),
        "unhealthy": list(weights.unhealthy),
        "series": [[s.name, list(s.ranks), list(s.ranks_between)] for s in weights.series],
        "nets": list(weights.nets),
        "grids": list(weights.grids),
        "corrections": _put(arrays, "fix", weights.corrections),
        "moe_series": list(weights.moe.series),
        "moe_corrections": _put(arrays, "moe_fix", weights.moe.corrections),
        "moe_spread": weights.moe.spread,
        "spread": {k: dict(v) for k, v in weights.spread.items()},
        "notes": dict(weights.notes),
    }
    whole = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    write_bytes(path, save(whole, {"perfmodel": json.dumps(meta, sort_keys=True)}))


def load_collective_weights(calibration: Path | None = None) -> CollectiveWeights:
    """Read the shipped weights, or `collectives.safetensors` of a calibration folder (or that file itself).

    A folder that holds other weights but no collectives leaves them to the shipped ones.

    Raises:
        CalibrationError: if the file is missing, truncated, or of another schema version.
    """
    if calibration is None:
        path = Path(str(files("perfmodel.learn") / "weights" / FILE_NAME))
    else:
        path = Path(calibration)
        if path.is_dir() and not (path / FILE_NAME).exists() and _holds_others(path):
            return load_collective_weights()
        path = path / FILE_NAME if path.suffix != ".safetensors" else path
    if not path.is_file():
        raise CalibrationError(f"{path}: no such calibration; make one with `perfmodel fit TABLE --out DIR`")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _changed_ns: int) -> CollectiveWeights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as handle:
            meta = json.loads((handle.metadata() or {}).get("perfmodel", "{}"))
            arrays = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CalibrationError(f"{path}: truncated or not a weights file ({error}); fit it again") from None
    if meta.get("schema") != SCHEMA or meta.get("constants") != list(NAMES):
        raise CalibrationError(f"{path}: schema {meta.get('schema')!r} is not {SCHEMA!r} of this version; fit it again")
    try:
        return _weights(meta, arrays)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CalibrationError(f"{path}: incomplete weights file ({error!r}); fit it again") from None


def _holds_others(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or (folder / END_TO_END_FILE).is_file()


def _weights(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> CollectiveWeights:
    vectors, ranges = arrays["series/vector"], arrays["series/bytes"]
    return CollectiveWeights(
        series=tuple(
            Series(name, vectors[i], tuple(ranks), tuple(between), float(ranges[i, 0]), float(ranges[i, 1]))
            for i, (name, ranks, between) in enumerate(meta["series"])
        ),
        nets={kind: ResidualNet.of(_under(arrays, f"net/{kind}/")) for kind in meta["nets"]},
        corrections=_take(arrays, "fix", meta["corrections"], collective.COMPONENTS, _COLLECTIVE_COLUMNS),
        grids={
            name: ReferenceGrid(arrays[f"grid/{i}/ranks"], arrays[f"grid/{i}/size"], arrays[f"grid/{i}/fix"])
            for i, name in enumerate(meta["grids"])
        },
        moe=MoeWeights(
            series=dict(zip(meta["moe_series"], arrays["moe/vector"], strict=True)),
            corrections=_take(arrays, "moe_fix", meta["moe_corrections"], moe.COMPONENTS, _MOE_COLUMNS),
            spread=float(meta["moe_spread"]),
        ),
        spread=meta["spread"],
        reference_sources=tuple(meta["reference_sources"]),
        unhealthy=tuple(meta["unhealthy"]),
        notes=meta["notes"],
    )


_COLLECTIVE_COLUMNS: Final = (collective.CATEGORIES, collective.COORDINATES)
_MOE_COLUMNS: Final = (moe.CATEGORIES, moe.COORDINATES)


def _put(arrays: dict[str, np.ndarray], prefix: str, corrections: Mapping[str, Corrected]) -> list[Any]:
    listed = []
    for i, (name, corrected) in enumerate(corrections.items()):
        fix, names = kriging_arrays(corrected.kriging)
        local, groups = corrected.errors.arrays()
        fine, entries = corrected.fine.arrays()
        arrays |= {f"{prefix}/{i}/{key}": value for key, value in fix.items()}
        arrays |= {f"{prefix}/{i}/q/{key}": value for key, value in local.items()}
        arrays |= {f"{prefix}/{i}/fine/{key}": value for key, value in fine.items()}
        listed.append([name, names, groups, entries, corrected.left_out_error])
    return listed


def _take(
    arrays: Mapping[str, np.ndarray],
    prefix: str,
    listed: list[Any],
    components: tuple[Component, ...],
    columns: tuple[tuple[str, ...], tuple[str, ...]],
) -> dict[str, Corrected]:
    result = {}
    for i, (name, names, groups, entries, error) in enumerate(listed):
        own = _under(arrays, f"{prefix}/{i}/")
        kriging = kriging_of(components, *columns, own, names)
        errors = LocalErrors.of(_under(own, "q/"), groups)
        result[name] = Corrected(kriging, errors, FineTables.of(_under(own, "fine/"), entries), error)
    return result


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}
