"""Describes a calibration's weights from their metadata: rows, devices, software and held-out
errors."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

from perfmodel.cost.learn._weights import (
    belongs,
    read_header,
    shipped_folder,
    weight_files,
    weights_folder,
)
from perfmodel.cost.learn.collectives import collective_weights
from perfmodel.cost.learn.stack import Stack
from perfmodel.ops import FAMILIES, KernelKind

_KEPT_OUT: Final = {
    "shapes": "in_range",
    "larger shapes": "large_left_out",
    "devices": "device_left_out",
}
"""Figures in the record (percent) by way of holding rows out, and by device where there are
several."""


def describe_calibration(calibration: Path | str | None = None) -> dict[str, str]:
    """One line per weights file: rows, devices and software that it was fitted on.

    Raises:
        CalibrationError: if the directory is missing, or a file truncated or of another schema
            version.
    """
    lines = {"folder": str(weights_folder(calibration))}
    for file in calibration_files(calibration):
        if "series" in file:
            odd = [f"{count:,} rows set aside: {why}" for why, count in file["set_aside"].items()]
            lines[file["name"]] = "; ".join([f"{file['series']} measured series", *odd])
        else:
            devices = len(file["devices"])
            software = len(file["software"])
            lines[file["name"]] = (
                f"{file['rows']:,} rows, {devices} devices, {software} software versions"
            )
    return lines


def calibration_files(calibration: Path | str | None = None) -> list[dict[str, Any]]:
    """The data and held-out errors of every weights file of a calibration.

    Returns:
        Of kernels `name`, `rows`, `devices`, `software`, and for each way of keeping out (`shapes`,
        `larger shapes`, `devices`) that was tried: `[way, rows, mean absolute error, bias]`
        (fractions) in `kept_out`, with the `coverage_90` of shapes kept out; of collectives `name`,
        `series`, `set_aside` (reason -> rows).

    Raises:
        CalibrationError: if the directory is missing, or a file truncated or of another schema
            version.
    """
    folder = weights_folder(calibration)
    return [_records_of_file(folder, path) for path in sorted(folder.glob("*.safetensors"))]


def _records_of_file(folder: Path, path: Path) -> dict[str, Any]:
    """Return the data behind one weights file, as `calibration_files` reports it."""
    if path.stem == "collectives":
        weights = collective_weights(weight_files(folder))
        return {
            "name": path.stem,
            "series": len(weights.series),
            "set_aside": weights.notes.get("set_aside", {}),
        }
    header = read_header(path)
    stacks, record = header["stacks"], header["record"]
    rows = 0
    for stack in stacks:
        rows += sum(stack["kinds"].values())
    kept_out = []
    for way, key in _KEPT_OUT.items():
        tried = record.get(key, {})
        # one set of figures, or one for each device that was left out
        figures = [tried] if "n" in tried else list(tried.values())
        n = sum(part["n"] for part in figures)
        if n:
            kept_out.append(
                [way, n, _mean_of(figures, "mean_ape") / 100, _mean_of(figures, "bias") / 100]
            )
    return {
        "name": path.stem,
        "rows": rows,
        "devices": sorted({stack["figures"]["name"] for stack in stacks}),
        "software": sorted({stack["software"] for stack in stacks}),
        "kept_out": kept_out,
        "coverage_90": record.get("in_range", {}).get("coverage_90"),
    }


def _mean_of(figures: list[dict[str, Any]], name: str) -> float:
    """Mean of one figure over the held-out parts, weighted by their rows."""
    n = sum(part["n"] for part in figures)
    return sum(part["n"] * part[name] for part in figures if part["n"]) / n


def measured_kinds(
    calibration: Path | str | None, device: str, family: str
) -> dict[KernelKind, int]:
    """Count a device's measured kernels behind the regressors of a family, by kind."""
    stacks = []
    for folder in dict.fromkeys((weights_folder(calibration), shipped_folder())):
        for path in sorted(folder.glob("*.safetensors")):
            # Headers are read alone: arrays take most of a file.
            if belongs(path, family):
                stacks += read_header(path)["stacks"]

    counts: Counter[KernelKind] = Counter()
    for stack in stacks:
        if stack["figures"]["name"] == device:
            counts.update(Stack.from_dict(stack).kinds)
    return counts


def kernel_records() -> dict[str, dict[str, Any]]:
    """Return the training record of every shipped regressor (data, seed, errors)."""
    records = {}
    for path in sorted(shipped_folder().glob("*.safetensors")):
        if any(belongs(path, family) for family in FAMILIES):
            records[path.stem] = read_header(path)["record"]
    return records
