"""Launch files as flat tables of entries, each with its line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.files import TooLargeError, load_yaml_documents, read_text
from perfmodel.spec import Model

AUTO: Final = "auto"
UNSAID: Final = (None, AUTO, "???", "null", "None")
"""Values that leave an entry to the framework: OmegaConf's `???`, DeepSpeed's and Composer's
`auto`."""


@dataclass(frozen=True)
class Entry:
    """One value of a file."""

    value: Any
    line: int
    """Line number, from 1; 0 if unknown. For entries of an included file, the line that includes
    it."""
    included: tuple[str, int] | None = None
    """Path and line of the included file that has the entry; None if it is not included."""
    is_default: bool = False
    """Whether the entry changes nothing by itself: the framework has this value anyway, or other
    entries refer to it or inherit from it."""


Entries = Mapping[str, Entry]
"""Entries by key; keys of nested tables are joined by dots."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Entries of a file, before they are interpreted."""

    place: str
    entries: Entries
    notes: tuple[str, ...] = field(default=())
    """Parts of it that were not read, one sentence each."""
    doubts: tuple[str, ...] = field(default=())
    """Sentences on what may be wrong in a prediction because the file alone does not tell it."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Values as written in the file, references unresolved; empty for scripts."""
    devices: int | None = None
    """Devices of the run that wrote the file (by a hook); files for launchers do not have it."""
    model: Model | None = None
    """The model of such a run, from its own configuration."""
    recipe_model: Model | None = None
    """The model of the recipe that the file names; entries may change its sizes."""
    without_model: LaunchFileError | None = None
    """The refusal of a file that can be read only if the user gives the model."""


def as_list(value: Any) -> list[Any]:
    """A value as a list, for settings that take one value or several."""
    return value if isinstance(value, list) else [value]


def yaml_value(text: str) -> Any:
    """The value of a command-line setting, parsed as YAML; the text itself if it is no single YAML
    document.

    Raises:
        TooLargeError: aliases that multiply.
    """
    import yaml

    try:
        documents = load_yaml_documents(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if not documents:
        return None
    return documents[0] if len(documents) == 1 else text


@dataclass(frozen=True)
class NamedFile:
    """A file that a launch file refers to."""

    path: Path
    text: str


@dataclass(frozen=True)
class Neighbours:
    """Files that a launch file may refer to: those in its folder, and those that a script writes
    itself."""

    folder: Path
    written: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that the script writes, by their names without folders."""

    def find(self, name: str) -> NamedFile | None:
        """The file of this relative path or name; None if it does not exist.

        Raises:
            LaunchFileError: it cannot be read.
        """
        # A file that the script writes replaces an existing one of that name.
        file_name = Path(name).name
        if file_name in self.written:
            return NamedFile(self.folder / file_name, self.written[file_name])
        # Paths are those of the cluster; a copy of the files often lies in one folder.
        try:
            path = next(
                (path for path in (self.folder / name, self.folder / file_name) if path.is_file()),
                None,
            )
        except (OSError, ValueError):
            return None
        if path is None:
            return None
        try:
            return NamedFile(path, read_text(path))
        except (OSError, UnicodeDecodeError, TooLargeError):
            raise LaunchFileError(
                f"{path}: cannot be read; fix it, or remove it from the launch file"
            ) from None


def included_entries(entries: Entries, path: Path, line: int) -> dict[str, Entry]:
    """Entries of an included file: errors give the line in it, notes the line that includes it.

    Args:
        path: path of the included file.
        line: line of the file that includes it; 0 for none.
    """
    return {
        key: Entry(entry.value, line, entry.included or (str(path), entry.line))
        for key, entry in entries.items()
    }


def broken_at(place: str, entry: Entry, message: str) -> LaunchFileError:
    """The error for a value; it names the file and line that hold the value, also in an included
    file."""
    return (
        broken(*entry.included, message) if entry.included else broken(place, entry.line, message)
    )


def broken(place: str, line: int, message: str) -> LaunchFileError:
    """The error for a file, in one line with file, line and remedy."""
    return LaunchFileError(f"{place}, line {line}: {message}" if line else f"{place}: {message}")
