"""What a calibration holds, for people (`perfmodel doctor`)."""

from pathlib import Path

from perfmodel.cost.learn import collective_weights, read_header, weight_files, weights_folder


def describe_calibration(calibration: Path | str | None = None) -> dict[str, str]:
    """One line per weights file: rows, devices and software that it was fitted on.

    Raises:
        CalibrationError: if the directory is missing, or a file truncated or of another schema version.
    """
    folder = weights_folder(calibration)
    lines = {"folder": str(folder)}
    for path in sorted(folder.glob("*.safetensors")):
        if path.stem == "collectives":
            weights = collective_weights(weight_files(folder))
            odd = [f"{count:,} rows set aside: {why}" for why, count in weights.notes.get("set_aside", {}).items()]
            lines[path.stem] = "; ".join([f"{len(weights.series)} measured series", *odd])
            continue
        stacks = read_header(path)["stacks"]
        rows = sum(sum(stack["kinds"].values()) for stack in stacks)
        devices = {stack["figures"]["name"] for stack in stacks}
        software = {stack["software"] for stack in stacks}
        lines[path.stem] = f"{rows:,} rows, {len(devices)} devices, {len(software)} software versions"
    return lines
