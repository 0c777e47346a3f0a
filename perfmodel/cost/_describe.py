"""What a calibration holds, for people (`perfmodel doctor`)."""

from pathlib import Path
from typing import Any, Final

from perfmodel.cost.learn import collective_weights, read_header, weight_files, weights_folder

_KEPT_OUT: Final = {"shapes": "in_range", "larger shapes": "large_left_out", "devices": "device_left_out"}
"""Way of keeping rows out of a fit -> its figures in the record (percent), by device where there are several."""


def describe_calibration(calibration: Path | str | None = None) -> dict[str, str]:
    """One line per weights file: rows, devices and software that it was fitted on.

    Raises:
        CalibrationError: if the directory is missing, or a file truncated or of another schema version.
    """
    lines = {"folder": str(weights_folder(calibration))}
    for file in calibration_files(calibration):
        if "series" in file:
            odd = [f"{count:,} rows set aside: {why}" for why, count in file["set_aside"].items()]
            lines[file["name"]] = "; ".join([f"{file['series']} measured series", *odd])
        else:
            devices, software = len(file["devices"]), len(file["software"])
            lines[file["name"]] = f"{file['rows']:,} rows, {devices} devices, {software} software versions"
    return lines


def calibration_files(calibration: Path | str | None = None) -> list[dict[str, Any]]:
    """What every weights file of a calibration rests on, and how far off its fit was on what was kept out of it.

    Returns:
        Of kernels `name`, `rows`, `devices`, `software`, and for each way of keeping out (`shapes`, `larger shapes`,
        `devices`) that was tried: `[way, rows, mean absolute error, bias]` (fractions) in `kept_out`, with the
        `coverage_90` of shapes kept out; of collectives `name`, `series`, `set_aside` (reason -> rows).

    Raises:
        CalibrationError: if the directory is missing, or a file truncated or of another schema version.
    """
    folder = weights_folder(calibration)
    return [_of_file(folder, path) for path in sorted(folder.glob("*.safetensors"))]


def _of_file(folder: Path, path: Path) -> dict[str, Any]:
    if path.stem == "collectives":
        weights = collective_weights(weight_files(folder))
        return {"name": path.stem, "series": len(weights.series), "set_aside": weights.notes.get("set_aside", {})}
    header = read_header(path)
    stacks, record = header["stacks"], header["record"]
    kept_out = []
    for way, key in _KEPT_OUT.items():
        tried = record.get(key, {})
        figures = [tried] if "n" in tried else list(tried.values())
        n = sum(one["n"] for one in figures)
        if n:
            mean, bias = (sum(one["n"] * one[name] for one in figures if one["n"]) / n for name in ("mean_ape", "bias"))
            kept_out.append([way, n, mean / 100, bias / 100])
    return {
        "name": path.stem,
        "rows": sum(sum(stack["kinds"].values()) for stack in stacks),
        "devices": sorted({stack["figures"]["name"] for stack in stacks}),
        "software": sorted({stack["software"] for stack in stacks}),
        "kept_out": kept_out,
        "coverage_90": record.get("in_range", {}).get("coverage_90"),
    }
