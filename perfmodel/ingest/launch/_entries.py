"""Launch files parsed into flat tables of entries, each with its line."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.display import json_text
from perfmodel.errors import LaunchFileError
from perfmodel.files import TooLargeError, compose_yaml, parse_json, parse_toml, read_text
from perfmodel.spec import Model

if TYPE_CHECKING:
    import yaml

MOST_RESOLVED: Final = 1_000_000
"""Characters of one value with its references replaced: each reference may double what the one before it stands for."""
MOST_OPERANDS: Final = 16
"""Operands of one product or sum at most; more factors make a number of thousands of digits."""
MOST_REFERENCES: Final = 100_000
"""Values that are looked at while the references of a file are replaced."""
AUTO: Final = "auto"
UNSAID: Final = (None, AUTO, "???", "null", "None")
"""Values that leave an entry to the framework: OmegaConf's `???`, DeepSpeed's and Composer's `auto`."""
_REFERENCE: Final = re.compile(r"\$\{([^${}]*)\}")
_TOML_SECTION: Final = re.compile(r"^\s*\[+\s*([\w.\"'-]+)\s*\]+")
_TOML_KEY: Final = re.compile(r"^\s*([\w.\"'-]+)\s*=")


@dataclass(frozen=True)
class Entry:
    """One value of a file."""

    value: Any
    line: int
    """Line from 1; 0 where it is not known. For what an included file says, the line that includes it."""
    included: tuple[str, int] | None = None
    """Path of the included file that says it, and the line there."""
    is_default: bool = False
    """Whether it says nothing by itself: the framework has this value anyway, as far as the file tells, or the table
    that it stands in is there for others to take over."""


Entries = Mapping[str, Entry]
"""Entries by key; keys of nested tables are joined by dots."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Entries of a file, before they are interpreted."""

    place: str
    entries: Entries
    notes: tuple[str, ...] = field(default=())
    """Parts of it that were not read, one sentence each."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Values as written in the file, references unresolved; empty for scripts."""
    devices: int | None = None
    """Devices of the run that wrote the file (by a hook); files for launchers do not have it."""
    model: Model | None = None
    """The model of such a run, by its own configuration."""
    recipe_model: Model | None = None
    """The model of the recipe that it names, whose sizes its entries may change."""


def as_list(value: Any) -> list[Any]:
    """A value as a list, for settings that take one value or several."""
    return value if isinstance(value, list) else [value]


def yaml_value(text: str) -> Any:
    """The value of a command-line setting, parsed as YAML; the text itself if it is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class NamedFile:
    """A file that a launch file refers to."""

    path: Path
    text: str


@dataclass(frozen=True)
class Neighbours:
    """Files that a launch file may refer to: those in its folder, and those that a script writes itself."""

    folder: Path
    written: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that the script writes, by their names without folders."""

    def find(self, name: str) -> NamedFile | None:
        """The file of this relative path or name; None if it does not exist.

        Raises:
            LaunchFileError: it cannot be read.
        """
        # What the script writes replaces a file of that name.
        plain = Path(name).name
        if plain in self.written:
            return NamedFile(self.folder / plain, self.written[plain])
        # Paths are those of the cluster; a copy of the files often lies in one folder.
        try:
            path = next((path for path in (self.folder / name, self.folder / plain) if path.is_file()), None)
        except (OSError, ValueError):
            return None
        if path is None:
            return None
        try:
            return NamedFile(path, read_text(path))
        except (OSError, UnicodeDecodeError, TooLargeError):
            raise LaunchFileError(f"{path}: cannot be read; fix it, or remove it from the launch file") from None


def included_entries(entries: Entries, path: Path, line: int) -> dict[str, Entry]:
    """Entries of an included file: errors give the line in it, notes the line that includes it.

    Args:
        path: of the file.
        line: of the other one, which names it; 0 for none.
    """
    return {key: Entry(entry.value, line, entry.included or (str(path), entry.line)) for key, entry in entries.items()}


def broken_at(place: str, entry: Entry, message: str) -> LaunchFileError:
    """The error for a value; it names the file and line that hold the value, also in an included file."""
    return broken(*entry.included, message) if entry.included else broken(place, entry.line, message)


def broken(place: str, line: int, message: str) -> LaunchFileError:
    """The error for a file, in one line with file, line and remedy."""
    return LaunchFileError(f"{place}, line {line}: {message}" if line else f"{place}: {message}")


def read_toml(text: str, place: str) -> Source:
    """Entries of a TOML file."""
    try:
        data = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise LaunchFileError(f"{place}: not valid TOML: {error}; fix that line") from None
    lines: dict[str, int] = {}
    # Python's reader of TOML forgets where a key stood. A second pass over the lines finds the plain cases; a key
    # that it does not find is reported without its line.
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _TOML_SECTION.match(line)
        key = _TOML_KEY.match(line)
        if header:
            section = header[1].replace('"', "") + "."
        elif key:
            lines.setdefault(section + key[1].replace('"', ""), number)
    return _plain(_with_lines(data, lines), place)


def read_json(text: str, place: str) -> Source:
    """Entries of a JSON file that holds one object."""
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise broken(place, error.lineno, f"not valid JSON: {error.msg}; fix this line") from None
    except ValueError as error:
        raise LaunchFileError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise broken(place, 1, "must hold one JSON object, {...}")
    # JSON is YAML but for its tabs, and the reader of YAML knows lines.
    notes: list[str] = []
    lines = {key: entry.line for key, entry in _yaml_entries(text.replace("\t", " "), place, notes).items()}
    return replace(_plain(_with_lines(data, lines), place), notes=tuple(notes))


def _plain(entries: dict[str, Entry], place: str) -> Source:
    return Source(place=place, entries=entries, written={key: entry.value for key, entry in entries.items()})


def read_yaml(text: str, place: str, folder: Path) -> Source:
    """Entries of a YAML file, with those of the files that it includes.

    Included are the files of its Hydra `defaults` and MaxText's `base_config`, from `folder`. References are resolved
    as OmegaConf writes them (`${a.b}`, `${.sibling}`, `${oc.env:NAME,default}`); one that cannot be resolved stays as
    it is written.
    """
    notes: list[str] = []
    file_entries = _yaml_entries(text, place, notes)
    merged: dict[str, Entry] = {}
    # References are resolved after all files are merged, as OmegaConf does: an included file may refer to a value
    # that this one replaces.
    for part in _parts(file_entries, folder, notes):
        merged |= {key.removeprefix(wrapper_of(key)): entry for key, entry in part.items()}
    written = {key: entry.value for key, entry in file_entries.items()}
    return Source(place=place, entries=_resolved(merged, place), notes=tuple(notes), written=written)


WRAPPERS: Final = ("ConfigContainer.", "parameters.")
"""Tables in which the whole configuration may stand: Megatron-Bridge's recipes, MosaicML's jobs."""


def wrapper_of(key: str) -> str:
    """Prefix (with its dot) of the table that wraps the whole configuration and this key; else empty."""
    return next((wrapper for wrapper in WRAPPERS if key.startswith(wrapper)), "")


class _NamedFile(NamedTuple):
    """A file that another is made of."""

    name: str
    prefix: str
    """Beginning that its keys get."""
    line: int
    """Line of the other file that names it."""


def _parts(entries_of_file: dict[str, Entry], folder: Path, notes: list[str]) -> Iterator[dict[str, Entry]]:
    """The files that a file is made of, first what later ones replace (Hydra: `_self_` is last unless it is listed)."""
    entries_of_file = dict(entries_of_file)
    listed = entries_of_file.pop("defaults", Entry([], 0))
    names: list[Any] = listed.value if isinstance(listed.value, list) else []
    # What comes later replaces what comes before; None stands for the file itself.
    order: list[_NamedFile | None] = []
    # MaxText: `base_config: base.yml` is loaded below the file (MaxText/pyconfig.py).
    base = entries_of_file.get("base_config")
    if base is not None and isinstance(base.value, str):
        order.append(_NamedFile(base.value, "", base.line))
    # Primus: files that this one begins with.
    extended = entries_of_file.pop("extends", Entry([], 0))
    for name in [extended.value] if isinstance(extended.value, str) else extended.value or []:
        order.append(_NamedFile(str(name), "", extended.line))
    for item in names:
        if item == "_self_":
            order.append(None)
        elif isinstance(item, str):
            order.append(_NamedFile(f"{item}.yaml", "", listed.line))
        elif isinstance(item, dict):
            # `- model: llama` is the file model/llama.yaml, whose keys begin with `model.`.
            groups = [(str(k), v) for k, v in item.items() if not str(k).startswith("override ") and v is not None]
            order += [_NamedFile(f"{group}/{name}.yaml", f"{group}.", listed.line) for group, name in groups]
    for part in order if None in order else [*order, None]:
        if part is None:
            yield entries_of_file
            continue
        path = folder / part.name
        if not path.is_file():
            notes.append(
                f"{part.name} (line {part.line}), which the file builds on, was not found beside it; its settings "
                "are missing here"
            )
            continue
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise broken(str(path), 0, f"cannot be read ({error})") from None
        entries = included_entries(_yaml_entries(text, str(path)), path, part.line)
        # What the included file is based on itself is not followed.
        yield {f"{part.prefix}{key}": entry for key, entry in entries.items() if key != "defaults"}


_TEMPLATE: Final = re.compile(r"\{\{|\{%|<%")
"""Marks by which Jinja and its like begin a place to fill in."""


def _is_template(text: str, line: int) -> bool:
    """Whether a line (from 1; 0 for any) has places to fill in."""
    lines = text.splitlines()
    return bool(_TEMPLATE.search(lines[line - 1] if 0 < line <= len(lines) else text))


def _merged_tables(root: Any) -> set[int]:
    """Identities of the tables that `<<` takes over elsewhere; many stand where they do only for that."""
    # An explicit stack: a stranger's file may nest deeper than Python's own
    # recursion goes, and aliases may form a ring.
    tables: set[int] = set()
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        for item in node.value:
            key_node, child = item if isinstance(item, tuple) else (None, item)
            if key_node is not None and key_node.value == "<<":
                sources = child.value if isinstance(child.value, list) and child.id == "sequence" else [child]
                tables.update(map(id, sources))
            waiting.append(child)
    return tables


def _template_error(place: str, line: int) -> LaunchFileError:
    return broken(place, line, "this is a template, not YAML; replace the parts in {{ }} or {% %} first")


def _yaml_tree(text: str, place: str) -> "yaml.MappingNode":
    """The nodes of a YAML file, which unlike finished values know their lines.

    Raises:
        LaunchFileError: no YAML, a template of YAML, or YAML without keys.
    """
    import yaml

    try:
        root = compose_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        if _is_template(text, line):
            raise _template_error(place, line) from None
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise broken(place, line, f"not valid YAML: {problem}; fix this line") from None
    except ValueError as error:
        raise LaunchFileError(f"{place}: {error}; this is not a launch file") from None
    if not isinstance(root, yaml.MappingNode):
        raise broken(place, 1, "must hold keys and values, `key: value`")
    return root


def _yaml_entries(text: str, place: str, notes: list[str] | None = None) -> dict[str, Entry]:
    """Entries of a YAML file; of a key that is given twice the last counts, as in every loader in use.

    Args:
        notes: to which a sentence is added for every key that is given twice.
    """
    import yaml

    root = _yaml_tree(text, place)
    loader = yaml.SafeLoader("")
    entries: dict[str, Entry] = {}

    def value_of(node: yaml.Node) -> Any:
        try:
            return loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, TypeError):  # a tag of the framework's own, or a date that is none
            return str(node.value)

    merged_tables = _merged_tables(root)

    def walk(node: yaml.MappingNode, prefix: str, is_merged: bool) -> None:
        seen: set[str] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                if _is_template(text, line):
                    raise _template_error(place, line)
                raise broken(place, line, "a key must be plain text, as in `key: value`; fix this line")
            if key_node.value in seen and key_node.value != "<<" and notes is not None:
                notes.append(f"{prefix}{key_node.value} appears twice; the last value counts (line {line})")
            seen.add(key_node.value)
        try:
            # Replaces `<<` by the pairs that it stands for, in front of the table's own.
            loader.flatten_mapping(node)
        except yaml.YAMLError:
            raise broken(place, node.start_mark.line + 1, "`<<` must name another table; fix it") from None
        # What `<<` brings comes first, and what the table itself says replaces it.
        last = {str(key_node.value): (key_node.start_mark.line + 1, child) for key_node, child in node.value}
        for key, (line, child) in last.items():
            if isinstance(child, yaml.MappingNode) and child.value:
                walk(child, f"{prefix}{key}.", is_merged or id(child) in merged_tables)
            else:
                entries[f"{prefix}{key}"] = Entry(value_of(child), line, is_default=is_merged)

    walk(root, "", False)
    return entries


def _resolved(entries: dict[str, Entry], place: str) -> dict[str, Entry]:
    """Entries with their references replaced; raises for those that refer to themselves."""
    looked_at = 0

    def resolve(key: str, value: Any, line: int, path: tuple[str, ...]) -> Any:
        nonlocal looked_at
        looked_at += 1
        # Ten keys that each refer twice to the next already stand for a thousand values.
        if looked_at > MOST_REFERENCES:
            raise broken(
                place, line, f"its references expand to more than {MOST_REFERENCES:,} values; write the values out"
            )
        if isinstance(value, list):
            return [resolve(key, item, line, path) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        # The innermost reference has no other in it, so that it is replaced first; then the one around it can be read.
        for _ in range(value.count("${") + 1):
            match = _REFERENCE.search(value)
            if match is None:
                return value
            referred = _referred(match[1], key, entries)
            if referred is None:
                return value
            name, target = referred
            if name in path:
                raise broken(place, line, f"{key} refers to itself through ${{{match[1]}}}; write its value")
            target = resolve(name or key, target, line, (*path, name) if name else path)
            # A value that is one reference keeps the type of its target; inside a text it becomes text.
            if match[0] == value:
                return target
            value = value[: match.start()] + str(target) + value[match.end() :]
            if len(value) > MOST_RESOLVED:
                raise broken(place, line, f"{key} becomes longer than {MOST_RESOLVED:,} characters; write its value")
        return value

    try:
        return {
            key: replace(entry, value=resolve(key, entry.value, entry.line, (key,))) for key, entry in entries.items()
        }
    except RecursionError:
        raise broken(place, 0, "its references are nested too deeply; write the values") from None


def _referred(text: str, key: str, entries: Mapping[str, Entry]) -> tuple[str, Any] | None:
    """Key (empty for none) and value that a reference stands for; None where it stands for nothing known."""
    kind, colon, rest = text.partition(":")
    if colon:
        first, comma, default = (part.strip() for part in rest.partition(","))
        # Resolvers of OmegaConf and of NeMo; all others need the framework to run.
        if kind in ("oc.env", "env"):
            value = os.environ.get(first, default if comma else None)
            return None if value is None else ("", _scalar(value))
        if kind in RESOLVERS and comma:
            operands = [_scalar(part.strip()) for part in rest.split(",")]
            if len(operands) <= MOST_OPERANDS and all(isinstance(operand, int) for operand in operands):
                result = RESOLVERS[kind](operands)
                return None if result is None else ("", _scalar(str(result)))
        return None
    dots = len(text) - len(text.lstrip("."))
    name = text.strip(". ")
    if dots:
        parents = key.split(".")[:-dots]
        name = ".".join([*parents, name])
    # A file of a Hydra group names itself from the root of the configuration: `training.model.X` is its `model.X`.
    while name not in entries and "." in name and not dots:
        name = name.partition(".")[2]
    return (name, entries[name].value) if name in entries else None


def _quotient(operands: Sequence[int]) -> int | None:
    """Quotient of two whole numbers, rounded down; None for other values."""
    return operands[0] // operands[1] if len(operands) == 2 and operands[1] else None


def _quotient_up(operands: Sequence[int]) -> int | None:
    """Quotient of two whole numbers, rounded up; None for other values."""
    return -(-operands[0] // operands[1]) if len(operands) == 2 and operands[1] else None


RESOLVERS: Final[Mapping[str, Callable[[Sequence[int]], int | None]]] = {
    "multiply": prod,
    "sum": sum,
    "add": sum,
    "subtract": lambda operands: operands[0] - sum(operands[1:]),
    "divide_ceil": _quotient_up,
    "divide_floor": _quotient,
    "int_div": _quotient,
    "min": min,
    "max": max,
}
"""Arithmetic in configurations of NeMo (`nemo/core/config`, the launcher's own and its users')."""


def _scalar(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _with_lines(data: Mapping[str, Any], lines: Mapping[str, int]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                entries[f"{prefix}{key}"] = Entry(value, lines.get(f"{prefix}{key}", 0))

    walk(data, "")
    return entries


def write_toml(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """A TOML file of dotted keys, one section per first part."""
    lines = [f"# {comment}" for comment in comments]
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {_toml(value)}")
    for section, rows in sections.items():
        lines += ["", f"[{section}]", *rows] if section else rows
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = [f"{json_text(key)} = {_toml(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    return json_text(value) if isinstance(value, (str, bool, int, float)) else str(value)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        table = root
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return root


def write_json(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """Write a JSON object; comments are left out, as JSON has none."""
    return json_text(_nested(values), indent=2) + "\n"


def write_yaml(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """A YAML file of nested tables."""
    import yaml

    head = "".join(f"# {comment}\n" for comment in comments)
    return head + yaml.safe_dump(_nested(values), sort_keys=False, default_flow_style=False)
