"""Names, progress and checkpoints of the several trainings behind one regressor."""

from collections.abc import Callable
from pathlib import Path

Report = Callable[[int, int, float], None]
"""Called with (step, steps, mean absolute log error on the shapes that stop training early)."""


class Stages:
    """Checkpoint files and progress lines of one regressor's trainings."""

    def __init__(
        self, name: str, checkpoints: Path | None = None, progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        self._name, self._folder, self._progress = name, checkpoints, progress

    def report(self, stage: str) -> Report | None:
        """Progress callback of one training; `None` if nobody listens."""
        progress = self._progress
        if progress is None:
            return None

        def report(now: int, steps: int, error: float) -> None:
            shown = f", held-out error {100 * error:.2f} %" if error == error else ""
            progress(f"{self._name}: {stage}{shown}", now, steps)

        return report

    def checkpoint(self, stage: str) -> Path | None:
        """Checkpoint file of one training; `None` if none are wanted."""
        return None if self._folder is None else self._folder / f".{self._name}.{stage}.ckpt.npz"

    def clear(self) -> None:
        """Remove the checkpoints of finished trainings."""
        if self._folder is not None:
            for path in self._folder.glob(f".{self._name}.*.ckpt.npz"):
                path.unlink()
