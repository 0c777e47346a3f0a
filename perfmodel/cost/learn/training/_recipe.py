"""Recipes (how one regressor is trained, read from TOML) and the stages of a training."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from perfmodel.display import Report
from perfmodel.errors import CalibrationError, UnknownNameError
from perfmodel.files import parse_toml, read_text
from perfmodel.ops import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one regressor."""

    name: str
    """Name of the weights file."""
    family: str
    dtypes: tuple[str, ...] = ()
    """Dtype classes that this regressor serves; empty for all."""
    hidden: tuple[int, int, int] = (192, 192, 64)
    stack_size: int = 12
    """Width of the stack embedding."""
    table_size: int = 8
    """Width of the tables along shape axes."""
    steps: int = 20_000
    batch: int = 2048
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    rows_per_stack: int = 30_000
    """Sampling weight of a stack saturates at this many rows."""
    patience: int = 16
    """Checks of the held-out error without gain before training stops."""
    refit_steps: int = 4_000
    """Steps in which the network, trained without the kept-out shapes, goes on with all rows."""
    left_out_steps: int = 4_000
    """Steps of each training in which a device or the large shapes are left out."""
    devices_out: tuple[str, ...] = ()
    """Devices left out in turn; the four with most samples if none are named."""
    holdout: float = 0.15
    """Share of shapes kept out to measure errors and intervals."""
    members: int = 1
    """Networks that differ in their seed; the mean of their log times is predicted."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UnknownNameError("op family", self.family, FAMILIES)
        if (
            min(self.steps, self.batch, self.members) < 1
            or not 0 < self.holdout < 1
            or len(self.hidden) != 3
        ):
            raise CalibrationError(
                f"recipe {self.name}: steps, batch and members must be positive, holdout must be "
                "between 0 and 1, and hidden must list three layer widths"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON gives them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Inverse of `to_dict`; settings that an older record lacks take their defaults."""
        # JSON knows no tuples
        settings: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**settings)


def read_recipe(path: Path | str) -> Recipe:
    """Read one recipe.

    Raises:
        CalibrationError: for a file that is not TOML, lacks `name` or `family`, or has unknown
            keys.
    """
    path = Path(path)
    try:
        values = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: not a readable recipe ({error})") from None
    known = {f.name for f in fields(Recipe)}
    unknown = set(values) - known
    if unknown:
        raise CalibrationError(
            f"{path}: unknown keys {sorted(unknown)}; a recipe has {sorted(known)}"
        )
    missing = {"name", "family"} - set(values)
    if missing:
        raise CalibrationError(f"{path}: {sorted(missing)} missing")
    return Recipe.from_dict(values)


def small_recipe(family: str, rows: int) -> Recipe:
    """A recipe for a user's table: width and steps grow with the number of rows."""
    if rows < 500:
        width, steps = 16, 600
    elif rows < 20_000:
        width, steps = 64, 3_000
    else:
        width, steps = 128, 10_000
    return Recipe(
        name=family,
        family=family,
        hidden=(width, width, width // 2),
        stack_size=4,
        table_size=4,
        steps=steps,
        batch=min(1024, max(32, rows // 2)),
        refit_steps=steps // 3,
        left_out_steps=steps // 2,
        holdout=0.2,
    )


StepReport = Callable[[int, int, float], None]
"""Function that reports the progress of a training: its arguments are the step, the number of
steps, and the mean absolute log error on the shapes that stop training early."""


class Stages:
    """Checkpoint files and progress lines of one regressor's trainings."""

    def __init__(
        self, name: str, checkpoints: Path | None = None, progress: Report | None = None
    ) -> None:
        self._name = name
        self._folder = checkpoints
        self._progress = progress

    def report(self, stage: str) -> StepReport | None:
        """Progress callback of one training; `None` if no progress is shown."""
        progress = self._progress
        if progress is None:
            return None

        def report(now: int, steps: int, error: float) -> None:
            # without shapes to stop by the error is NaN, which equals nothing, not even itself
            error_text = f", held-out error {100 * error:.2f} %" if error == error else ""
            progress(f"{self._name}: {stage}{error_text}", now, steps)

        return report

    def checkpoint(self, stage: str) -> Path | None:
        """Checkpoint file of one training; `None` if none are wanted."""
        return None if self._folder is None else self._folder / f".{self._name}.{stage}.ckpt.npz"

    def clear(self) -> None:
        """Remove the checkpoints of finished trainings."""
        if self._folder is not None:
            for path in self._folder.glob(f".{self._name}.*.ckpt.npz"):
                path.unlink()
