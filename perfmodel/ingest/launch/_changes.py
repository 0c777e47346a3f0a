"""The settings of a launch file that must change to run another layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.ingest.launch._export import launch_values
from perfmodel.ingest.launch._read import launch_format
from perfmodel.spec import Job, Layout, Model

_SEPARATORS: Final = {"toml": " = ", "yaml": ": ", "json": ": "}


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting of a launch file before and after the change; None if absent."""

    name: str
    before: str | None
    after: str | None

    @property
    def diff(self) -> tuple[str, ...]:
        """The change as the lines of a diff."""
        removed = () if self.before is None else (f"- {self.before}",)
        return removed if self.after is None else (*removed, f"+ {self.after}")


def changed_settings(
    before: tuple[Layout, Job],
    after: tuple[Layout, Job],
    framework: str,
    *,
    model: Model | str | None = None,
    devices_per_node: int,
) -> tuple[SettingChange, ...]:
    """The settings that differ between the launch files of two layouts, written as in the file.

    Raises:
        UnknownNameError: no launch files of this framework are known.
        LaunchFileError: the framework cannot run one of the layouts.
    """
    form = launch_format(framework)

    def values_of(layout: Layout, job: Job) -> dict[str, Any]:
        return launch_values(
            layout, framework, model=model, job=job, devices_per_node=devices_per_node
        )

    values_before = values_of(*before)
    values_after = values_of(*after)
    changes = []
    # Settings that both files have come first, in the order of the file; those that only the new
    # layout needs, last.
    for name in dict.fromkeys((*values_before, *values_after)):
        line_before = _line(name, values_before, form.syntax)
        line_after = _line(name, values_after, form.syntax)
        if line_before != line_after:
            changes.append(SettingChange(name=name, before=line_before, after=line_after))
    return tuple(changes)


def _line(name: str, values: Mapping[str, Any], syntax: str) -> str | None:
    """A setting as a line of the file; None if the file does not have it."""
    if name not in values:
        return None
    value = values[name]
    if syntax == "arguments":
        # A flag of a command line cannot be unset: it is off where it is not written.
        if value is False:
            return None
        return f"--{name}" if value is True else f"--{name} {value}"
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, str) and syntax == "toml":
        value = f'"{value}"'
    return f"{name}{_SEPARATORS[syntax]}{value}"
