"""Reading the text of compiled XLA modules (HLO)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from perfmodel.errors import PerfModelError
from perfmodel.ir.importers._graph import Array

Type = Array | tuple["Type", ...]
"""An array, or a tuple of types."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`name = type opcode(operands), attributes`."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    literal: str = ""
    """Text between the parentheses of parameters and constants."""

    def axes(self, attribute: str) -> tuple[int, ...]:
        """An attribute such as `{0,1}` as numbers; empty where it is absent."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attributes.get(attribute, "")))


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in an order in which they can run; the root is what it returns."""

    name: str
    instructions: tuple[Instruction, ...]
    root: str


@dataclass(frozen=True)
class HloModule:
    """A module: computations by name."""

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    entry: str
    n_devices: int
    """Partitions times replicas."""


_HEADER: Final = re.compile(r"^HloModule ([\w.\-]+)")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY: Final = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_COMMENT: Final = re.compile(r"/\*.*?\*/")
_OPERAND: Final = re.compile(r"%([\w.\-]+)")
_OPENING: Final = "([{"
_CLOSING: Final = ")]}"


def parse_module(text: str) -> HloModule:
    """Parse the text of a module that `Compiled.as_text()` returns.

    Raises:
        PerfModelError: text that is not an HLO module, or that has a dynamic dimension (named with
            its line).
    """
    # One pass: a line opens a computation, closes it, or is an instruction of the open one.
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    match = None if header is None else _HEADER.match(header)
    if header is None or match is None:
        raise PerfModelError(
            "not an HLO module, because it has no line `HloModule name`; pass the result of `compiled.as_text()`"
        )
    computations: dict[str, Computation] = {}
    entry = current = ""
    body: list[Instruction] = []
    root = ""
    for number, line in enumerate(lines, 1):
        opening = _COMPUTATION.match(line)
        if opening is not None:
            is_entry, current = opening.groups()
            body = []
            root = ""
            if is_entry:
                entry = current
            continue
        if not current:
            continue
        if line.startswith("}"):
            # Where no instruction is marked as the root, the last one is.
            if not root and body:
                root = body[-1].name
            computations[current] = Computation(current, tuple(body), root)
            current = ""
            continue
        assignment = _INSTRUCTION.match(line)
        if assignment is None:
            continue
        is_root, name, value = assignment.groups()
        try:
            body.append(_instruction(name, _COMMENT.sub("", value)))
        except (ValueError, IndexError) as error:
            raise PerfModelError(
                f"HLO line {number}: {line.strip()[:80]!r} cannot be read ({error})"
            ) from None
        if is_root:
            root = name
    if entry not in computations:
        raise PerfModelError(
            f"HLO module {match.group(1)}: it has no ENTRY computation; pass the complete text"
        )
    # Absent counts mean 1.
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return HloModule(match.group(1), computations, entry, prod(map(int, counts)))


def _instruction(name: str, operation_text: str) -> Instruction:
    """Parse the right-hand side of an instruction."""
    # Types, operands and attributes nest brackets, so none of them can be cut by a regular
    # expression.
    kind, operation_text = _split_type(operation_text)
    opcode, _, operation_text = operation_text.partition("(")
    inside, operation_text = _until_closed(operation_text)
    attributes = {}
    for part in _top_level(operation_text):
        attribute, _, value = part.partition("=")
        attributes[attribute] = value

    # Operands are marked by a per cent sign in some versions of the text; in others they are the
    # last word of a part.
    operands = []
    for part in _top_level(inside):
        marked = _OPERAND.findall(part)
        operands += marked[-1:]
    if not operands and opcode not in ("parameter", "constant", "iota"):
        operands = [part.split()[-1] for part in _top_level(inside) if part]
    return Instruction(
        name, kind, opcode.strip(), tuple(operands), attributes, "" if operands else inside
    )


def _split_type(text: str) -> tuple[Type, str]:
    """Cut the type off the start of a text."""
    if text.startswith("("):
        inside, remaining = _until_closed(text[1:])
        return tuple(_split_type(part)[0] for part in _top_level(inside)), remaining.lstrip()
    head, _, remaining = text.partition(" ")
    match = _ARRAY.match(head)
    if match is None:
        if head.startswith(("token", "opaque")):
            return Array.of("token", ()), remaining
        raise ValueError(f"{head!r} is not a type")
    dtype, dims = match.groups()
    # Bounded or unknown sizes have no fixed cost.
    if "<=" in dims or "?" in dims:
        raise ValueError(f"dynamic dimension in {match.group(0)}; compile for fixed shapes")
    return Array.of(dtype, tuple(int(n) for n in dims.split(",") if n)), remaining


def _until_closed(text: str) -> tuple[str, str]:
    """Split a text at the parenthesis that closes the one before it."""
    for i, _, depth in _unquoted(text):
        if depth < 0:
            return text[:i], text[i + 1 :]
    raise ValueError("a parenthesis is not closed")


def _top_level(text: str) -> Iterator[str]:
    """Split a text at commas outside brackets and quotes."""
    start = 0
    for i, character, depth in _unquoted(text):
        if character == "," and depth == 0:
            part = text[start:i].strip()
            if part:
                yield part
            start = i + 1
    last_part = text[start:].strip()
    if last_part:
        yield last_part


def _unquoted(text: str) -> Iterator[tuple[int, str, int]]:
    """Iterate over unquoted characters: index, character, number of open brackets after it."""
    # Backend settings are quoted JSON whose brackets and commas must not count.
    depth, quoted = 0, False
    for i, character in enumerate(text):
        if character == '"' and text[i - 1 : i] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character in _OPENING) - (character in _CLOSING)
            yield i, character, depth
