"""Compares the layout of a user's launch file with a search's, and lists what to change."""

import argparse
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._predict import predicted
from perfmodel.errors import PerfModelError
from perfmodel.spec import Problem
from perfmodel.units import duration, span

if TYPE_CHECKING:
    from perfmodel.ingest.launch import FileChanges, Launch
    from perfmodel.planning.layouts import SearchResult
    from perfmodel.prediction import Prediction

_SAME: Final = 0.005
"""A gain below this share counts as none."""


@dataclass(frozen=True, kw_only=True)
class UserLayout:
    """The layout of the launch file of --from."""

    prediction: "Prediction | None"
    why_not: str = ""
    """Reason why it has no prediction."""

    @property
    def line(self) -> str:
        """Time with interval, memory, and layout, a line each, like the recommended layout."""
        from perfmodel.prediction.text import memory_words

        p = self.prediction
        if p is None:
            return f"yours: {self.why_not}"
        interval = f"90 %: {span(duration(p.step_time_lo_s), duration(p.step_time_hi_s))}"
        return f"yours: {duration(p.step_time_s)} per step ({interval})\n  {memory_words(p)}\n  {p.layout_notation}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: the prediction, or the reasons why it has none."""
        return {"reasons": [self.why_not]} if self.prediction is None else self.prediction.to_dict()


def predict_user_layout(arguments: argparse.Namespace) -> UserLayout | None:
    """Predict the launch file's own layout, with flags overriding the file; None if it has none."""
    # A layout that cannot be predicted is still the user's: say why, and go on with the search.
    launch: Launch | None = arguments.launch
    if launch is None or launch.layout is None:
        return None
    try:
        return UserLayout(prediction=predicted(arguments, launch.layout, quiet=True))
    except PerfModelError as error:
        return UserLayout(prediction=None, why_not=str(error))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The changes from a user's layout to the recommended one."""

    gain: float
    """Share of the time of a sequence that the change saves."""
    launch_file: str
    before_s: float
    after_s: float
    changes: "FileChanges | None"
    """What to change in the launch file; None if its framework cannot run the layout."""
    why_no_settings: str = ""

    @property
    def lines(self) -> list[str]:
        """The settings to change and the time saved, as text."""
        if abs(self.gain) < _SAME:
            return ["keep yours: it is as fast as the recommended layout"]
        if self.gain < 0:
            return [f"keep yours: the recommended layout takes {-self.gain:.1%} longer"]
        saved = f"saves {self.gain:.1%} of the time ({duration(self.before_s)} to {duration(self.after_s)} per step)"
        if self.changes is None:
            return [f"the recommended layout {saved}; {self.why_no_settings}"]

        # Settings of other files than the launch file are shown under the file's name.
        lines = [f"change, which {saved}:"]
        file = self.launch_file
        for change in self.changes.settings:
            if change.file != file:
                file = change.file
                lines.append(f"  in {file}:")
            lines += [f"  {line}" for line in change.diff]
        if self.changes.by_hand:
            lines.append(
                f"  set {', '.join(self.changes.by_hand)} in the training script, because perfmodel knows no such "
                "setting of this file"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        changes = self.changes
        return {
            "gain": self.gain,
            "settings": [asdict(change) for change in changes.settings] if changes else [],
            "by_hand": list(changes.by_hand) if changes else [],
        }


def advice(
    arguments: argparse.Namespace,
    problem: Problem,
    user_layout: UserLayout,
    result: "SearchResult",
) -> Advice | None:
    """The settings to change in the launch file; None if there is nothing to compare."""
    from perfmodel.ingest.launch import changed_settings

    if user_layout.prediction is None or not result.layouts:
        return None

    # Batches may differ between both, so that times are compared per sequence.
    before, after = user_layout.prediction, result.first_to_try
    gain = 1 - after.step_time_s / after.global_batch / (before.step_time_s / before.global_batch)

    # The framework of the launch file may be unable to run the recommended layout. The gain is
    # reported anyway.
    changes, why = None, ""
    launch: Launch = arguments.launch
    try:
        changes = changed_settings(
            launch,
            after.layout,
            replace(problem.job, global_batch=after.global_batch),
            model=problem.model,
            devices_per_node=problem.cluster.devices_per_node,
        )
    except PerfModelError as error:
        why = str(error)
    return Advice(
        gain=gain,
        launch_file=launch.path,
        before_s=before.step_time_s,
        after_s=after.step_time_s,
        changes=changes,
        why_no_settings=why,
    )
