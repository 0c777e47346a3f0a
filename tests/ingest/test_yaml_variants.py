"""The same YAML in other words is read the same: order, styles, quotes, anchors, merges,
comments."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch

FOLDER = Path(__file__).parent
FILES = sorted(
    path for path in FOLDER.rglob("*.y*ml") if path.parent.name in ("launch_files", "strangers")
)


def facts(launch: Launch) -> tuple[object, ...]:
    """All that a file says, without its lines."""
    model = launch.model
    shape = None if model is None else {**model.values(), "source": ""}
    sentences = {re.sub(r"line \d+", "", line) for line in (*launch.may_be_wrong, *launch.ignored)}
    return (
        launch.format,
        shape,
        launch.layout,
        launch.global_batch,
        launch.devices,
        launch.job_fields,
        launch.framework,
        sentences,
    )


class Writer:
    """Writes a tree in one of the ways that YAML has."""

    def __init__(self, data: st.DataObject, tree: Any) -> None:
        self.data = data
        self.anchors: dict[str, str] = {}
        self.top = tree

    def often(self, of: int = 4) -> bool:
        return self.data.draw(st.integers(1, of)) == 1

    def scalar(self, value: Any, *, is_key: bool = False) -> str:
        # Whether a word needs quotes is left to the library, as are numbers.
        text = yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")
        if isinstance(value, str) and not any(letter in value for letter in "'\"\\\n"):
            quoted = [f'"{value}"', f"'{value}'"]
            text = self.data.draw(
                st.sampled_from(quoted if set(value) & set("{}[],?") else [text, *quoted])
            )
        if is_key or value is None:
            return text
        known = repr((type(value).__name__, value))
        if known in self.anchors:
            return f"*{self.anchors[known]}" if self.often(2) else text
        if self.often():
            self.anchors[known] = f"a{len(self.anchors)}"
            return f"&{self.anchors[known]} {text}"
        return text

    def flow(self, node: Any) -> str:
        if isinstance(node, dict):
            inner = ", ".join(
                f"{self.scalar(key, is_key=True)}: {self.flow(value)}"
                for key, value in self.items(node)
            )
            return f"{{{inner}}}"
        if isinstance(node, list):
            return "[" + ", ".join(self.flow(item) for item in node) + "]"
        # An alias needs a space before the sign that follows it.
        return self.scalar(node) + " "

    def items(self, node: dict[Any, Any]) -> list[tuple[Any, Any]]:
        return self.data.draw(st.permutations(list(node.items())))

    def block(self, node: Any, indent: str) -> str:
        """What stands behind a colon or a dash."""
        if isinstance(node, dict | list) and (not node or self.often(6)):
            return " " + self.flow(node) + self.end()
        if isinstance(node, list):
            return self.end() + "".join(
                f"{indent}-{self.block(item, indent + '  ')}" for item in node
            )
        if not isinstance(node, dict):
            return " " + self.scalar(node) + self.end()
        entries = self.items(node)
        merged = self.data.draw(st.integers(0, len(entries))) if self.often() else 0
        lines = ""
        if merged:
            # Keys that a mapping takes from another one.
            others = dict(entries[:merged])
            lines = f"{indent}<<: {self.flow(others)}" + self.end()
        for key, value in entries[merged:]:
            lines += f"{indent}{self.scalar(key, is_key=True)}:{self.block(value, indent + '  ')}"
        return self.end() + lines

    def end(self) -> str:
        return self.data.draw(st.sampled_from(["\n", "\n", "\n", "  # so it is\n", "\n\n", " \n"]))

    def text(self) -> str:
        start = self.data.draw(
            st.sampled_from(["", "---\n", "# A run\n", "\n\n", "%YAML 1.1\n---\n"])
        )
        return start + self.block(self.top, "").lstrip()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_file_in_other_words_says_the_same(path: Path, data: st.DataObject) -> None:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        plain = parse_launch(yaml.safe_dump(tree), path.name)
    except (yaml.YAMLError, LaunchFileError):
        # Tags of a program, templates, and files that are refused.
        return
    text = Writer(data, tree).text()
    assert yaml.safe_load(text) == tree, text
    assert facts(parse_launch(text, path.name)) == facts(plain), text
