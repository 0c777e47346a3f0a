"""Weights files: safetensors with the whole description in their metadata."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import CalibrationError
from perfmodel.io import write_bytes
from perfmodel.learn._intervals import Intervals
from perfmodel.learn._kinds import KindCode
from perfmodel.learn._parameters import LAYERED, Parameters
from perfmodel.learn._physics import AXES
from perfmodel.learn._regressor import Regressor
from perfmodel.learn._stack import Stack

SCHEMA_VERSION: Final = 2
FORMAT: Final = "perfmodel-kernels"
_NEEDED: Final = ("name", "family", "dtypes", "stacks", "groups", "code", "intervals", "record", "layers")


def save_regressor(regressor: Regressor, directory: Path) -> Path:
    """Write `<name>.safetensors` atomically; networks and tables are stored as float16."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {"cells": regressor.cells}
    for name, value in regressor.params._asdict().items():
        if name in LAYERED:
            for i, array in enumerate(value):
                arrays[f"{name}.{i}"] = np.ascontiguousarray(array, np.float16 if name == "tables" else np.float32)
        else:
            arrays[name] = np.ascontiguousarray(value, np.float32)
    described = {
        "name": regressor.name,
        "family": regressor.family,
        "dtypes": list(regressor.dtypes),
        "stacks": [s.to_dict() for s in regressor.stacks],
        "groups": [list(g) for g in regressor.groups],
        "code": [list(regressor.code.dtypes), list(regressor.code.ops), list(regressor.code.passes)],
        "intervals": regressor.intervals.to_dict(),
        "record": regressor.record,
        "layers": len(regressor.params.kernels),
    }
    metadata = {"format": FORMAT, "schema_version": str(SCHEMA_VERSION), "description": json.dumps(described)}
    path = Path(directory) / f"{regressor.name}.safetensors"
    write_bytes(path, save(arrays, metadata))
    return path


def read_header(path: Path) -> dict[str, Any]:
    """Metadata of a weights file without its arrays.

    Raises:
        CalibrationError: if the file is missing, truncated, no weights file or of another schema version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CalibrationError(
            f"{path}: weights are missing or truncated ({str(error).splitlines()[0]}); fit or install them again"
        ) from None
    if metadata.get("format") != FORMAT:
        raise CalibrationError(f"{path}: not a kernel weights file (format {metadata.get('format')!r})")
    if metadata.get("schema_version") != str(SCHEMA_VERSION):
        raise CalibrationError(
            f"{path}: weights have schema version {metadata.get('schema_version')}, this release reads "
            f"{SCHEMA_VERSION}; fit them again with `perfmodel fit`"
        )
    try:
        described = json.loads(metadata["description"])
        missing = [name for name in _NEEDED if name not in described]
    except (KeyError, ValueError):
        missing = list(_NEEDED)
    if missing:
        raise CalibrationError(f"{path}: the weights' description lacks {', '.join(missing)}; fit them again")
    return described


def load_regressor(path: Path) -> Regressor:
    """Read a weights file.

    Raises:
        CalibrationError: as `read_header`, or if an array is missing, misshapen or not finite.
    """
    from safetensors.numpy import load_file

    described = read_header(path)
    arrays = load_file(path)
    stacks = tuple(Stack.from_dict(s) for s in described["stacks"])
    groups = tuple((int(s), str(k)) for s, k in described["groups"])
    family = described["family"]
    try:
        values: dict[str, Any] = {}
        for name in Parameters._fields:
            count = len(AXES[family]) if name == "tables" else described["layers"]
            if name in LAYERED:
                values[name] = tuple(arrays[f"{name}.{i}"].astype(np.float32) for i in range(count))
            else:
                values[name] = arrays[name].astype(np.float32)
        params = Parameters(**values)
        cells = arrays["cells"]
    except KeyError as error:
        raise CalibrationError(f"{path}: array {error} is missing; fit the weights again") from None
    if len(params.log_fixed_s) != len(groups) or params.stack_embedding.shape[-2] != len(stacks):
        raise CalibrationError(f"{path}: arrays and description disagree in size; fit the weights again")
    if not all(np.isfinite(a).all() for name, a in arrays.items() if name != "cells"):
        raise CalibrationError(f"{path}: weights hold values that are not finite; fit them again")
    code = KindCode(*(tuple(part) for part in described["code"]))
    return Regressor(
        name=described["name"], family=family, dtypes=tuple(described["dtypes"]), params=params, stacks=stacks,
        groups=groups, code=code, intervals=Intervals.from_dict(described["intervals"]), cells=cells,
        record=described["record"],
    )  # fmt: skip
