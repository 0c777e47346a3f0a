"""The settings of a user's launch file that must change to run another layout.

Changes are found by reading: a file with the changes gives the other layout when it is read back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError, UnknownNameError
from perfmodel.ingest.launch._entries import Entries, Entry
from perfmodel.ingest.launch._export import comparable, launch_values, without_own_cut
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._launch import Launch, Overrides, Reading
from perfmodel.ingest.launch._recognise import FORMATS
from perfmodel.ingest.launch._settle import settle
from perfmodel.ingest.launch._table import BadValue, Fields, Rule
from perfmodel.spec import Job, Layout, Model
from perfmodel.spec.notation import written

_SEPARATORS: Final = {
    ".toml": " = ",
    ".yaml": ": ",
    ".yml": ": ",
    ".json": ": ",
    ".py": " = ",
}
"""Text between key and value, by ending of the file; other files are scripts."""


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting of a launch file before and after the change; None if absent."""

    name: str
    before: str | None
    after: str | None
    file: str
    """Path of the file that has it: the launch file, or one that it names."""

    @property
    def diff(self) -> tuple[str, ...]:
        """The change as the lines of a diff."""
        removed = () if self.before is None else (f"- {self.before}",)
        return removed if self.after is None else (*removed, f"+ {self.after}")


@dataclass(frozen=True, kw_only=True)
class FileChanges:
    """Changes of a launch file after which it runs another layout."""

    settings: tuple[SettingChange, ...]
    by_hand: tuple[str, ...] = ()
    """Fields of the layout for which the file's format has no known key, in the notation of
    layouts."""


def changed_settings(
    launch: Launch, layout: Layout, job: Job, *, model: Model, devices_per_node: int
) -> FileChanges:
    """The settings that must change in a launch file so that it runs a layout, as in the file.

    Args:
        launch: the launch file as it was read.
        layout: the layout to run.
        job: the job to run; its batch, length and precision are the user's.

    Raises:
        LaunchFileError: the framework cannot run the layout.
    """
    if launch.reading is None:
        raise LaunchFileError(f"{launch.path}: its settings were not kept; read the file again")
    reading = launch.reading
    target = _Target(launch, reading, layout, job, model)
    written_anew = _written_anew(launch, reading.form, layout, job, model, devices_per_node)
    entries = target.repaired(_with_all(reading.entries, written_anew))
    entries = target.reduced(entries)

    changes = []
    for name in dict.fromkeys((*reading.entries, *entries)):
        before = reading.entries.get(name)
        after = entries.get(name)
        if before is not after:
            changes.append(_change(launch, reading.form, name, before, after))
    unsettled = target.wrong_fields(entries)
    return FileChanges(
        settings=tuple(changes),
        by_hand=tuple(
            f"{name}={written(value)}" for name, value in unsettled.items() if name != "dp"
        ),
    )


def _written_anew(
    launch: Launch,
    form: LaunchFormat,
    layout: Layout,
    job: Job,
    model: Model,
    devices_per_node: int,
) -> dict[str, Any]:
    """Keys that differ between files that perfmodel writes for both layouts; None for removed ones.

    Empty if perfmodel only reads files of this format.
    """
    if form not in FORMATS:
        return {}

    def values_of(layout: Layout) -> dict[str, Any]:
        return launch_values(
            layout, launch.framework, model=model, job=job, devices_per_node=devices_per_node
        )

    try:
        after = values_of(layout)
    except UnknownNameError:
        return {}
    try:
        before = values_of(launch.layout) if launch.layout else {}
    except LaunchFileError:
        # The user's layout cannot be written; all keys of the new one are candidates.
        before = {}
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    removed = {name: None for name in before if name not in after}
    return removed | changed


class _Target:
    """The layout and batch that a changed file has to state."""

    def __init__(
        self, launch: Launch, reading: Reading, layout: Layout, job: Job, model: Model
    ) -> None:
        self._launch = launch
        self._reading = reading
        self._model = model
        self._layout = layout
        self._wanted = comparable(without_own_cut(launch.framework, layout, model)).values()
        self._passes = job.global_batch // (layout.dp * layout.micro_batch)
        self._global_batch = job.global_batch
        # What the user states by a flag is not the file's, and the file need not state it.
        self._overrides = Overrides(
            model=model, seq_len=job.seq_len, dtype=job.dtype, needs_layout=False
        )
        unchanged, _ = self._read(reading.entries)
        if unchanged is None or unchanged.devices != layout.devices:
            self._overrides = replace(self._overrides, devices=layout.devices)
            unchanged, _ = self._read(reading.entries)
        if unchanged is None or unchanged.global_batch != job.global_batch:
            self._overrides = replace(self._overrides, global_batch=job.global_batch)

    def _read(self, entries: Entries) -> tuple[Launch | None, Fields]:
        """The launch of changed settings, and the fields that they state; None if contradictory."""
        form, place = self._reading.form, self._launch.path
        try:
            stated, _ = form.read(entries, place, self._overrides.states)
            stated = replace(stated, fields=stated.fields | self._reading.commented)
            launch = settle(
                stated,
                self._overrides,
                place=place,
                form=form,
                framework_name=self._launch.framework,
                unread=(),
                notes=(),
            )
        except LaunchFileError:
            return None, {}
        return launch, stated.fields

    def wrong_fields(self, entries: Entries) -> dict[str, Any]:
        """Fields that the settings do not state as wanted, with the wanted values."""
        launch, stated = self._read(entries)
        if launch is None or launch.layout is None:
            return self._wanted
        got = comparable(
            without_own_cut(self._launch.framework, launch.layout, self._model)
        ).values()
        wrong = {name: value for name, value in self._wanted.items() if got[name] != value}
        # Devices given by a flag decide the number of replicas, but the file may state another.
        if stated.get("dp", self._layout.dp) != self._layout.dp:
            wrong["dp"] = self._layout.dp
        if "micro_batch" in stated and "grad_accum" in stated:
            if stated["grad_accum"] != self._passes:
                wrong["grad_accum"] = self._passes
        elif launch.global_batch != self._global_batch:
            wrong["global_batch"] = self._global_batch
        return wrong

    def repaired(self, entries: Entries) -> Entries:
        """Settings that state as many wanted fields as the format has keys for."""
        # Files hold keys that perfmodel never writes (older names, other axes of a mesh). Where
        # they contradict the wanted layout, values are tried until the file reads as wanted.
        wrong = self.wrong_fields(entries)
        while wrong:
            for trial in self._trials(entries, wrong):
                still_wrong = self.wrong_fields(trial)
                if len(still_wrong) < len(wrong):
                    entries, wrong = trial, still_wrong
                    break
            else:
                return entries
        return entries

    def _trials(self, entries: Entries, wrong: Mapping[str, Any]) -> Iterator[Entries]:
        """Settings with one key changed so that a rule states one more wrong field as wanted."""
        numbers = [value for value in wrong.values() if type(value) is int]
        texts = [value for value in wrong.values() if isinstance(value, str)]
        values = (*numbers, False, True, *texts, None)
        for rule in self._reading.form.table:
            now = _fields_of(rule, entries)
            # Keys that the file has are changed before others are added.
            names = sorted(rule.keys, key=lambda name: name not in entries)
            for name, value in product(names, values):
                trial = _with(entries, name, value)
                if _brings_closer(_fields_of(rule, trial), now, wrong):
                    yield trial

    def reduced(self, entries: Entries) -> Entries:
        """The settings without changes that are not needed."""
        before = self._reading.entries
        wrong = self.wrong_fields(entries)
        for name in dict.fromkeys((*before, *entries)):
            if before.get(name) is entries.get(name):
                continue
            trial = _restored(entries, before, name)
            if self.wrong_fields(trial) != wrong:
                continue
            if self._contradicted(trial) <= self._contradicted(entries):
                entries = trial
        return entries

    def _contradicted(self, entries: Entries) -> set[str]:
        """Fields that the settings state unlike the layout, with or without effect.

        Frameworks refuse some that have none, such as virtual stages without a pipeline.
        """
        _, stated = self._read(entries)
        layout = self._layout.values()
        return {name for name, value in stated.items() if layout.get(name, value) != value}


def _brings_closer(after: Fields, before: Fields, wrong: Mapping[str, Any]) -> bool:
    """Whether fields of a rule state a wrong field as wanted, or no longer state it wrongly."""
    for name, value in wrong.items():
        if before.get(name) == value or before.get(name) == after.get(name):
            continue
        if name not in after or after[name] == value:
            return True
    # A rule for sizes of a mesh states several degrees at once.
    return "dp" in wrong and after != before and "dp" in after


def _fields_of(rule: Rule, entries: Entries) -> Fields:
    """The fields that a rule reads from its keys; none if their values make no sense."""
    stated = {name: entries[name].value for name in rule.keys if name in entries}
    settings = rule.said(stated)
    try:
        return rule.read(settings) if settings else {}
    except (BadValue, LaunchFileError, KeyError):
        return {}


def _with(entries: Entries, name: str, value: Any) -> Entries:
    """The settings with one of them changed, or removed for None; unchanged ones are the same
    objects."""
    if value is None:
        return {key: entry for key, entry in entries.items() if key != name}
    old = entries.get(name)
    if old is not None and _same(old.value, value):
        return entries
    new = Entry(value=value, line=0) if old is None else replace(old, value=value)
    return {**entries, name: new}


def _with_all(entries: Entries, values: Mapping[str, Any]) -> Entries:
    for name, value in values.items():
        entries = _with(entries, name, value)
    return entries


def _restored(entries: Entries, before: Entries, name: str) -> Entries:
    """The settings with one of them as it was before."""
    restored = {key: entry for key, entry in entries.items() if key != name}
    if name in before:
        restored[name] = before[name]
    return restored


def _same(old: Any, new: Any) -> bool:
    """Whether a file's value says the same as a new one; scripts hold numbers as text."""
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    return str(old) == str(new)


def _change(
    launch: Launch, form: LaunchFormat, name: str, before: Entry | None, after: Entry | None
) -> SettingChange:
    """The change of a setting, in the notation of the file that has it."""
    included = before.included if before is not None else None
    file = included[0] if included else launch.path
    return SettingChange(
        name=name,
        before=None if before is None else _line(name, before.value, file, form),
        after=None if after is None else _line(name, after.value, file, form),
        file=file,
    )


def _line(name: str, value: Any, file: str, form: LaunchFormat) -> str | None:
    """A setting as a line of the file; None if the file leaves it out."""
    suffix = Path(file).suffix.lower()
    if suffix in _SEPARATORS:
        if suffix != ".py" and (value is None or isinstance(value, bool)):
            value = "null" if value is None else str(value).lower()
        elif isinstance(value, str) and suffix == ".toml":
            value = f'"{value}"'
        return f"{name}{_SEPARATORS[suffix]}{value}"
    # Command lines of MaxText and NeMo set keys of a file; all others have flags.
    if form in FORMATS and form.syntax != "arguments":
        return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
    if form.syntax == "arguments" and isinstance(value, bool):
        # A flag of Megatron cannot be unset: it is off where it is not written.
        return f"--{name}" if value else None
    return f"--{name} {_words(value)}"


def _words(value: Any) -> str:
    """A value as the words after a flag."""
    items: Iterable[Any] = value if isinstance(value, list) else (value,)
    return " ".join(map(str, items))
