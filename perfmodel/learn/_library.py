"""Where weights are found: the package's own, or a calibration directory in front of them."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from perfmodel.errors import CalibrationError
from perfmodel.learn._regressor import Regressor
from perfmodel.learn._rows import FAMILIES
from perfmodel.learn._weights import load_regressor, read_header


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
    if not any(folder.glob("*.safetensors")):
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


def kernel_records(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """By regressor, the record of its making (data, seed, errors) from each weights file's metadata."""
    paths = sorted((folder or shipped_folder()).glob("*.safetensors"))
    kernels = [path for path in paths if any(_belongs(path, family) for family in FAMILIES)]
    return {path.stem: read_header(path)["record"] for path in kernels}
