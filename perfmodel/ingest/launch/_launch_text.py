"""Writes settings as the text of an argument list, JSON, TOML or YAML."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.display import json_text
from perfmodel.ingest.launch._arguments import write_arguments


def _write_toml(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """A TOML file of dotted keys, one section per first part."""
    lines = [f"# {comment}" for comment in comments]
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {_toml(value)}")
    for section, rows in sections.items():
        if section:
            lines += ["", f"[{section}]", *rows]
        else:
            lines += rows
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


def _write_json(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """Write a JSON object; comments are left out, as JSON has none."""
    return json_text(_nested(values), indent=2) + "\n"


def _write_yaml(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """A YAML file of nested tables."""
    import yaml

    head = "".join(f"# {comment}\n" for comment in comments)
    return head + yaml.safe_dump(_nested(values), sort_keys=False, default_flow_style=False)


WRITERS: Final = {
    "arguments": write_arguments,
    "json": _write_json,
    "toml": _write_toml,
    "yaml": _write_yaml,
}
