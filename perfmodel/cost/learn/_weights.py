"""Weights files (safetensors with the whole description in their metadata), and where they are
found."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.cost.learn._regressor import Regressor
from perfmodel.cost.learn.intervals import Intervals
from perfmodel.cost.learn.parameters import LAYERED, Parameters
from perfmodel.cost.learn.rows import KindCode
from perfmodel.cost.learn.stack import Stack
from perfmodel.errors import CalibrationError
from perfmodel.files import UNSEALED, parse_json, require_intact, sealed
from perfmodel.ingest.tables import write_bytes
from perfmodel.ops import FAMILIES, KernelKind
from perfmodel.session import current_session

SCHEMA_VERSION: Final = 3
FORMAT: Final = "perfmodel-kernels"
_NEEDED: Final = (
    "name",
    "family",
    "dtypes",
    "stacks",
    "groups",
    "code",
    "intervals",
    "record",
    "layers",
)


def save_regressor(regressor: Regressor, directory: Path) -> Path:
    """Write `<name>.safetensors` atomically; tables are stored as float16, all else as float32."""
    # Tables are the most of a file, and interpolated: 16 bits are enough for them.
    arrays: dict[str, np.ndarray] = {"cells": regressor.cells}
    for name, value in regressor.params._asdict().items():
        if name in LAYERED:
            for i, array in enumerate(value):
                precision = np.float16 if name == "tables" else np.float32
                arrays[f"{name}.{i}"] = np.ascontiguousarray(array, precision)
        else:
            arrays[name] = np.ascontiguousarray(value, np.float32)
    # All that is not an array goes into the metadata as JSON.
    described = {
        "name": regressor.name,
        "family": regressor.family,
        "dtypes": list(regressor.dtypes),
        "stacks": [s.to_dict() for s in regressor.stacks],
        "groups": [[stack, str(kind)] for stack, kind in regressor.groups],
        "code": [
            list(regressor.code.dtypes),
            list(regressor.code.ops),
            list(regressor.code.passes),
        ],
        "intervals": regressor.intervals.to_dict(),
        "record": regressor.record,
        "layers": len(regressor.params.kernels),
    }
    metadata = {
        "format": FORMAT,
        "schema_version": str(SCHEMA_VERSION),
        "description": json.dumps(described),
    }
    path = Path(directory) / f"{regressor.name}.safetensors"
    write_bytes(path, sealed_weights(arrays, metadata))
    return path


def sealed_weights(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with its checksum among the metadata: the same bytes for the same content.

    The library writes metadata in an order that differs from call to call. So the header is
    rewritten: eight bytes with its length, then JSON, padded with spaces to a multiple of eight.
    """
    from safetensors.numpy import save

    content = save(dict(arrays), {**metadata, "checksum": UNSEALED})
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return sealed(len(text).to_bytes(8, "little") + text + content[end:])


def read_weights(path: Path) -> bytes:
    """Content of a weights file (raises `CalibrationError` where there is none)."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> CalibrationError:
    reason = str(error).splitlines()[0]
    return CalibrationError(
        f"{path}: weights are missing or truncated ({reason}); fit or install them again"
    )


def parse_weights(content: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Parse metadata and arrays of a safetensors file (raises `SafetensorError` or `ValueError` for
    others)."""
    from safetensors.numpy import load

    arrays = load(content)
    # the format: length of the header (8 bytes, little-endian), header (JSON), arrays
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}), arrays


def read_header(path: Path) -> dict[str, Any]:
    """Metadata of a weights file without its arrays.

    Raises:
        CalibrationError: if the file is missing, truncated, no weights file or of another schema
            version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    return _described(metadata, path)


def _described(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """Description that the metadata of a file hold."""
    if metadata.get("format") != FORMAT:
        raise CalibrationError(
            f"{path}: not a kernel weights file (format {metadata.get('format')!r})"
        )
    if metadata.get("schema_version") != str(SCHEMA_VERSION):
        raise CalibrationError(
            f"{path}: the weights have schema version {metadata.get('schema_version')}, but this release reads "
            f"{SCHEMA_VERSION}; fit them again with `perfmodel fit`"
        )
    try:
        described = parse_json(metadata["description"])
        missing = [name for name in _NEEDED if name not in described]
    except (KeyError, ValueError):
        missing = list(_NEEDED)
    if missing:
        raise CalibrationError(
            f"{path}: the weights' description lacks {', '.join(missing)}; fit them again"
        )
    return described


def load_regressor(path: Path, content: bytes | None = None) -> Regressor:
    """Read a weights file.

    Args:
        content: content of the file, if it has been read.

    Raises:
        CalibrationError: as `read_header`, or if an array is missing, misshapen or not finite.
    """
    from safetensors import SafetensorError

    content = read_weights(path) if content is None else content
    try:
        metadata, arrays = parse_weights(content)
    except (SafetensorError, ValueError) as error:
        raise _unreadable(path, error) from None
    described = _described(metadata, path)
    require_intact(content, path)
    # The file is parsed and its checksum is right, so an error from here on means that it was
    # written wrongly: every step names what is missing.
    stacks = tuple(Stack.from_dict(s) for s in described["stacks"])
    groups = tuple((int(stack), KernelKind.parse(kind)) for stack, kind in described["groups"])
    family = described["family"]
    try:
        values: dict[str, Any] = {}
        for name in Parameters._fields:
            count = len(FAMILIES[family].axes) if name == "tables" else described["layers"]
            # stored in 16 and 32 bits, computed in 32
            if name in LAYERED:
                values[name] = tuple(arrays[f"{name}.{i}"].astype(np.float32) for i in range(count))
            else:
                values[name] = arrays[name].astype(np.float32)
        params = Parameters(**values)
        cells = arrays["cells"]
    except KeyError as error:
        raise CalibrationError(f"{path}: array {error} is missing; fit the weights again") from None
    # arrays that do not fit the description would give wrong times instead of an error
    n_groups = len(params.log_fixed_s)
    n_stacks = params.stack_embedding.shape[-2]
    if n_groups != len(groups) or n_stacks != len(stacks):
        raise CalibrationError(
            f"{path}: arrays and description disagree in size; fit the weights again"
        )
    if not all(np.isfinite(a).all() for name, a in arrays.items() if name != "cells"):
        raise CalibrationError(f"{path}: weights hold values that are not finite; fit them again")
    code = KindCode(*(tuple(part) for part in described["code"]))
    return Regressor(
        name=described["name"],
        family=family,
        dtypes=tuple(described["dtypes"]),
        params=params,
        stacks=stacks,
        groups=groups,
        code=code,
        intervals=Intervals.from_dict(described["intervals"]),
        cells=cells,
        record=described["record"],
    )


END_TO_END_FILE = "end_to_end.json"
"""File of parameters fitted to measured runs, with or without other weights."""


_SETTLED_NS: Final = 2_000_000_000
"""Age from which a file's time stamp identifies its content; coarse clocks give files written in
quick succession the same stamp."""
_ATTEMPTS: Final = 20


@dataclass(frozen=True)
class WeightFiles:
    """A snapshot of all files of a calibration folder; equal if folder and content are equal."""

    folder: Path
    digest: str
    """Checksum of names and contents; empty for the shipped folder, which does not change."""
    content: Mapping[str, bytes] | None = field(compare=False, repr=False)
    """Bytes by file name; None for the shipped folder, whose files are read on demand."""

    @property
    def names(self) -> list[str]:
        """Names of all files, sorted."""
        if self.content is not None:
            return sorted(self.content)
        return sorted(path.name for path in _files(self.folder))

    def read(self, name: str) -> bytes:
        """Content of a file (raises `CalibrationError` where it cannot be read)."""
        return self.content[name] if self.content is not None else read_weights(self.folder / name)


def weight_files(calibration: Path | str | None) -> WeightFiles:
    """The current files of a calibration; read again if anything in the folder has changed.

    Raises:
        CalibrationError: as `weights_folder`; or files that do not stop changing.
    """
    folder = shipped_folder() if calibration is None else weights_folder(calibration)
    if folder == shipped_folder():
        return WeightFiles(folder, "", None)
    signature = _signature(folder)

    # A file that has just changed may change again within a tick of its clock, so its content is
    # not cached now.
    last_change_ns = 0
    for _, modified_ns, changed_ns, *_ in signature:
        last_change_ns = max(last_change_ns, modified_ns, changed_ns)
    if time.time_ns() - last_change_ns < _SETTLED_NS:
        return _read_all(folder)
    return current_session().weight_files.get_or_compute(
        (folder, signature), lambda: _read_all(folder)
    )


def _files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob(END_TO_END_FILE)]


def _signature(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Name, times of change, size and inode of every file; it changes whenever a file is replaced
    or written to."""
    facts = []
    for path in _files(folder):
        status = path.stat()
        facts.append(
            (path.name, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        )
    return tuple(sorted(facts))


def _read_all(folder: Path) -> WeightFiles:
    """Contents of all files, read while the folder did not change."""
    for _ in range(_ATTEMPTS):
        # a fit may be writing: only files that are the same before and after belong together
        try:
            before = _signature(folder)
            content = {name: (folder / name).read_bytes() for name, *_ in before}
            if before and _signature(folder) == before:
                break
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    else:
        raise CalibrationError(
            f"{folder}: the weights are being changed; wait until `perfmodel fit` has ended"
        )
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name} {len(data)} ".encode() + data)
    return WeightFiles(folder, digest.hexdigest(), content)


def shipped_folder() -> Path:
    """The folder of the weights that come with the package."""
    return Path(str(files("perfmodel.cost.learn") / "weights"))


def weights_folder(calibration: Path | str | None) -> Path:
    """The folder to read weights from: the shipped one for `None`.

    Raises:
        CalibrationError: if the folder does not exist or holds no weights file.
    """
    if calibration is None or str(calibration) == "default":
        return shipped_folder()
    folder = Path(calibration)
    if not folder.is_dir():
        raise CalibrationError(
            f"{folder}: this calibration does not exist; make one with `perfmodel fit TABLE --out {folder}`"
        )
    if not any(folder.glob("*.safetensors")) and not (folder / END_TO_END_FILE).is_file():
        raise CalibrationError(
            f"{folder}: the folder has no weights (*.safetensors); make them with `perfmodel fit`"
        )
    return folder.resolve()


class MeasuredLoad(NamedTuple):
    """Measured slowdown of kernels on a device under sustained load."""

    device: str
    family: str
    dtype: str
    slowdown: float
    """Time under sustained load over that of a kernel timed alone."""


def measured_loads(weights: WeightFiles) -> tuple[MeasuredLoad, ...]:
    """Slowdowns under load from the tables of a user's calibration, for all families.

    Raises:
        CalibrationError: for a file that is truncated or of another schema version.
    """
    loads: dict[MeasuredLoad, None] = {}
    for name in _kernel_files(weights):
        record = load_regressor(weights.folder / name, weights.read(name)).record
        for load in record.get("loads", []):
            loads[MeasuredLoad(*load)] = None
    return tuple(loads)


def measured_sm_share(weights: WeightFiles, device: str) -> float | None:
    """Share of a device that concurrent collectives occupy, from the tables of a user's
    calibration; None if unmeasured.

    Matrix products come first, because most collectives hide behind them; without any, the median
    over the other families counts.

    Raises:
        CalibrationError: for a file that is truncated or of another schema version.
    """
    shares: dict[str, float] = {}
    for name in _kernel_files(weights):
        regressor = load_regressor(weights.folder / name, weights.read(name))
        for measured_device, share in regressor.record.get("held_shares", []):
            if measured_device == device:
                shares[regressor.family] = share
    if not shares:
        return None
    return shares.get("gemm", float(np.median([*shares.values()])))


def _kernel_files(weights: WeightFiles) -> list[str]:
    """Names of the files of kernels that a fit wrote."""
    names = []
    for name in weights.names:
        is_of_kernels = any(belongs(Path(name), family) for family in FAMILIES)
        if name.endswith(".safetensors") and is_of_kernels:
            names.append(name)
    return names


def load_family(weights: WeightFiles, family: str) -> tuple[Regressor, ...]:
    """Load the regressors of a family, first the calibration's and then the shipped ones.

    Raises:
        CalibrationError: for a file that is truncated or of another schema version.
    """
    regressors = []
    for calibration in dict.fromkeys((weights, weight_files(None))):
        for name in calibration.names:
            path = calibration.folder / name
            if name.endswith(".safetensors") and belongs(path, family):
                regressors.append(load_regressor(path, calibration.read(name)))
    return tuple(regressors)


def belongs(path: Path, family: str) -> bool:
    """Whether a weights file belongs to a family."""
    return path.stem == family or path.stem.startswith(f"{family}_")
