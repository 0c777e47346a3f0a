"""Where weights are found: the package's own, or a calibration directory in front of them."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from perfmodel.errors import CalibrationError
from perfmodel.learn._regressor import Regressor
from perfmodel.learn._rows import FAMILIES
from perfmodel.learn._weights import load_regressor, read_header

END_TO_END_FILE = "end_to_end.json"
"""Parameters that measured runs gave, beside the weights or alone."""


def shipped_folder() -> Path:
    """The folder of the weights that come with the package."""
    return Path(str(files("perfmodel.learn") / "weights"))


def weights_folder(calibration: Path | str | None) -> Path:
    """The folder to read weights from: the shipped one for `None`.

    Raises:
        CalibrationError: if the folder does not exist or holds no weights file.
    """
    if calibration is None or str(calibration) == "default":
        return shipped_folder()
    folder = Path(calibration)
    if not folder.is_dir():
        raise CalibrationError(f"{folder}: no such calibration; make one with `perfmodel fit TABLE --out {folder}`")
    if not any(folder.glob("*.safetensors")) and not (folder / END_TO_END_FILE).is_file():
        raise CalibrationError(f"{folder}: holds no weights (*.safetensors); make them with `perfmodel fit`")
    return folder.resolve()


def load_family(folder: Path, family: str) -> tuple[Regressor, ...]:
    """Regressors of a family: those in `folder`, then the shipped ones.

    Raises:
        CalibrationError: for a file that is truncated or of another schema version.
    """
    folders = dict.fromkeys((folder, shipped_folder()))
    paths = [p for f in folders for p in sorted(f.glob("*.safetensors")) if _belongs(p, family)]
    return tuple(load_regressor(path) for path in paths)


def _belongs(path: Path, family: str) -> bool:
    return path.stem == family or path.stem.startswith(f"{family}_")


def measured_kinds(calibration: Path | str | None, device: str, family: str) -> dict[str, int]:
    """By kind (`dtype/op/pass`), how many measured kernels of a device its regressors of a family rest on."""
    counts: dict[str, int] = {}
    for folder in dict.fromkeys((weights_folder(calibration), shipped_folder())):
        for path in sorted(folder.glob("*.safetensors")):
            if _belongs(path, family):
                for stack in read_header(path)["stacks"]:
                    if stack["figures"]["name"] == device:
                        for kind, n in stack["kinds"].items():
                            counts[kind] = counts.get(kind, 0) + n
    return counts


def kernel_records(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """By regressor, the record of its making (data, seed, errors) from each weights file's metadata."""
    paths = sorted((folder or shipped_folder()).glob("*.safetensors"))
    kernels = [path for path in paths if any(_belongs(path, family) for family in FAMILIES)]
    return {path.stem: read_header(path)["record"] for path in kernels}
