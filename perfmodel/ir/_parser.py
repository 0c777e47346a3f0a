"""Parser of the text form: tokens and recursive descent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from perfmodel.errors import PerfModelError
from perfmodel.ir._function import Function
from perfmodel.ir._instruction import (
    CALL,
    PHASES,
    STREAMS,
    UNTAGGED,
    Attributes,
    Instruction,
    Parameter,
    Tag,
    Tensor,
    attributes,
)
from perfmodel.ir._program import ROLES, GlobalTensor, Piece

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)|(?P<newline>\n)|(?P<value>%[\w.'~-]+)|(?P<function>@(?=[A-Za-z_])[\w.]+)
    |(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan)(?![\w]))|(?P<word>[A-Za-z_]\w*)|(?P<string>"[^"\n]*")
    |(?P<mark>[(){}\[\],:=|@])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of text of one kind: value, function, number, word, string, mark or end."""

    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """All tokens, closed by one of kind `end`; comments (`//`) are skipped.

    Raises:
        PerfModelError: a character that starts no token.
    """
    read: list[Token] = []
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PerfModelError(f"program text, line {line}: {text[position]!r} is not valid here")
        # The pattern has a named group per kind of token, of which exactly one matches.
        kind = str(match.lastgroup)
        if kind == "newline":
            line += 1
        elif kind != "skip":
            read.append(Token(kind, match.group(), line))
        position = match.end()
    read.append(Token("end", "", line))
    return read


_WORDS = {"true": True, "false": False}


@dataclass
class Annotations:
    """Types and devices that the text states for values, to be compared with inferred ones."""

    types: list[tuple[int, str, Tensor]] = field(default_factory=list)
    devices: list[tuple[int, str, int]] = field(default_factory=list)


class Parser:
    """Recursive descent over the tokens of one text."""

    # One token of look-ahead is enough: the grammar is LL(1).
    def __init__(self, text: str) -> None:
        self.annotations: list[Annotations] = []
        self._tokens = tokens(text)
        self._next = 0
        self._discarded = 0

    @property
    def line(self) -> int:
        """Line of the token last read."""
        return self._tokens[max(self._next - 1, 0)].line

    def fail(self, message: str) -> NoReturn:
        raise PerfModelError(f"program text, line {self.line}: {message}")

    def module(self) -> tuple[list[Function], list[int]]:
        """All functions, and the lines of the last one's instructions and return."""
        functions, lines = [], []
        # Whole tensors may follow the functions; these two words begin no function.
        while self._peek().kind != "end" and self._peek().text not in ("input", "output"):
            self._expect("func")
            name, parameters = self._header()
            body, lines = self._body()
            functions.append(Function(name, parameters, tuple(body), self._return()))
            lines.append(self.line)
            self._expect("}")
        if not functions:
            self.fail(
                "the text has no function; write func @name(%x: fp32[2, 4] @0) { ... return %y }"
            )
        return functions, lines

    def global_tensors(
        self, types: Mapping[str, Tensor]
    ) -> tuple[list[GlobalTensor], list[GlobalTensor]]:
        """Parse the undivided inputs and outputs, which are listed below the functions."""
        sides: dict[str, list[GlobalTensor]] = {"input": [], "output": []}
        while self._peek().kind != "end":
            side = self._token().text
            if side not in sides:
                self.fail(f"expected input, output or the end, got {side!r}")
            sides[side].append(self._global_tensor(types))
        return sides["input"], sides["output"]

    def _global_tensor(self, types: Mapping[str, Tensor]) -> GlobalTensor:
        """Read a tensor of the program, with its role and its pieces."""
        # Names of whole tensors are quoted: those of imported models have characters that a
        # `%value` cannot have.
        name = self._take("string").text[1:-1]
        word = self._take("word").text
        if word not in ROLES:
            self.fail(f"{name}: expected a role ({', '.join(ROLES)}), got {word!r}")
        tensor = self._type()
        axes = dict(self._attributes())
        unknown = axes.keys() - {"batch_axis", "tensor_axis", "expert_axis"}
        if unknown:
            self.fail(
                f"{name}: axes are batch_axis, tensor_axis and expert_axis; got {min(unknown)}"
            )
        self._expect("=")
        pieces = [self._piece(name, tensor, types)]
        while self._accept(","):
            pieces.append(self._piece(name, tensor, types))
        return GlobalTensor(
            name=name,
            role=ROLES[ROLES.index(word)],
            dtype=tensor.dtype,
            shape=tensor.shape,
            pieces=tuple(pieces),
            **axes,
        )

    def _piece(self, name: str, tensor: Tensor, types: Mapping[str, Tensor]) -> Piece:
        """Read a piece of a whole tensor: a value's name, and where in the tensor it begins."""
        # A piece says where it begins; how far it reaches is the shape of its value, which must lie
        # inside the tensor.
        value = self._take("value").text[1:]
        start = self._literal()
        if value not in types:
            self.fail(f"{name}: the function has no value %{value}")
        part = types[value]
        is_inside = len(start) == part.rank == tensor.rank
        if is_inside:
            for first, n, size in zip(start, part.shape, tensor.shape, strict=True):
                is_inside = is_inside and 0 <= first <= size - n
        if not is_inside or part.dtype != tensor.dtype:
            self.fail(
                f"{name}: %{value}, {part}, at {list(start)} is not a part of {tensor.dtype}{list(tensor.shape)}"
            )
        return Piece(value, start)

    def _header(self) -> tuple[str, tuple[Parameter, ...]]:
        """Read the head of a function: its name, parameters and device count."""
        name = self._take("function").text[1:]
        self.annotations.append(Annotations())
        self._expect("(")
        parameters = []
        while self._peek().text != ")":
            parameters.append(self._parameter())
            if self._peek().text != ")":
                self._expect(",")
        self._expect(")")
        self._expect("{")
        return name, tuple(parameters)

    def _parameter(self) -> Parameter:
        """Read one parameter: its name and, if it is stated, its type."""
        name = self._take("value").text[1:]
        # A parameter without a type takes whatever a caller passes (callees of a module).
        if not self._accept(":"):
            return Parameter(name)
        tensor = self._type()
        # A known value of a parameter: a shape or index that the interpreter may compute with.
        if self._accept("="):
            tensor = Tensor(tensor.dtype, tensor.shape, tensor.device, self._literal())
        return Parameter(name, tensor)

    def _type(self) -> Tensor:
        """Read a type: an element type, a shape and a device."""
        dtype = self._take("word").text
        shape: tuple[int, ...] = ()
        if self._peek().text == "[":
            shape = self._literal()
        device = int(self._take("number").text) if self._accept("@") else 0
        return Tensor(dtype, shape, device)

    def _return(self) -> tuple[str, ...]:
        """Read the names that a function returns."""
        self._expect("return")
        names = []
        while self._peek().kind == "value":
            names.append(self._take("value").text[1:])
            if not self._accept(","):
                break
        return tuple(names)

    def _body(self) -> tuple[list[Instruction], list[int]]:
        """Instructions up to the return, and their lines."""
        instructions, lines = [], []
        # Lines are kept so that type errors can point into the text that the user wrote.
        while self._peek().text != "return":
            lines.append(self._peek().line)
            instructions.append(self._instruction())
        return instructions, lines

    def _instruction(self) -> Instruction:
        """Read one instruction: outputs, op, inputs, attributes and tag."""
        outputs = [self._output()]
        while self._accept(","):
            outputs.append(self._output())
        self._expect("=")
        token = self._token()
        if token.kind not in ("word", "function"):
            self.fail(f"expected an op or @function, got {token.text!r}")
        self._expect("(")
        inputs = []
        while self._peek().text != ")":
            inputs.append(self._take("value").text[1:])
            if self._peek().text != ")":
                self._expect(",")
        self._expect(")")
        values = self._attributes()
        tag = self._tag()
        # A call has no attributes of its own; the function's name takes their place.
        if token.kind == "function":
            return Instruction(
                CALL, tuple(inputs), tuple(outputs), attributes(function=token.text[1:]), tag
            )
        return Instruction(token.text, tuple(inputs), tuple(outputs), values, tag)

    def _output(self) -> str:
        """Read one output of an instruction: its name and, if it is stated, its type."""
        # `_` discards a result (as in DistIR's figure 2); each gets a name nobody can write, since
        # values are assigned once.
        if self._accept("_"):
            self._discarded += 1
            return f"_{self._discarded}"
        token = self._take("value")
        name = token.text[1:]
        # Types of results are inferred; a stated one is a claim, checked after inference.
        if self._accept(":"):
            self.annotations[-1].types.append((token.line, name, self._type()))
        elif self._accept("@"):
            self.annotations[-1].devices.append((token.line, name, int(self._take("number").text)))
        return name

    def _attributes(self) -> Attributes:
        """Read the attributes of an instruction, `{name = value, ...}`, if it has any."""
        values: dict[str, Any] = {}
        if self._accept("{"):
            while self._peek().text != "}":
                name = self._take("word").text
                self._expect("=")
                values[name] = self._literal()
                if self._peek().text != "}":
                    self._expect(",")
            self._expect("}")
        return attributes(**values)

    def _literal(self) -> Any:
        """Read a number, a text, a truth value or a list of these."""
        token = self._token()
        # Only a point, an exponent, `inf` or `nan` make a number a float, so that `1` and `1.0`
        # round-trip.
        if token.kind == "number":
            return float(token.text) if re.search(r"[.einf]", token.text) else int(token.text)
        if token.kind == "string":
            return token.text[1:-1]
        if token.text in _WORDS:
            return _WORDS[token.text]
        if token.text != "[":
            self.fail(f"expected a number, string, true, false or list, got {token.text!r}")
        items = []
        while not self._accept("]"):
            items.append(self._literal())
            if self._peek().text != "]":
                self._expect(",")
        return tuple(items)

    def _tag(self) -> Tag:
        """Parse what follows `|`: phase, layer, micro-batch and stream of an instruction."""
        if not self._accept("|"):
            return UNTAGGED
        values: dict[str, Any] = {}
        # A tag ends where the next instruction begins: with a `%value` or `_`, or with the return.
        while self._peek().kind == "word" and self._peek().text not in ("return", "_"):
            word = self._take("word").text
            if word in PHASES:
                values["phase"] = word
                continue
            self._expect("=")
            token = self._token()
            if word in ("layer", "micro_batch") and token.kind == "number":
                values[word] = int(token.text)
            elif word == "stream" and token.text in STREAMS:
                values[word] = token.text
            else:
                self.fail(
                    f"tags are a phase, layer=, micro_batch= and stream=; got {word}={token.text}"
                )
        return Tag(**values)

    def _peek(self) -> Token:
        return self._tokens[self._next]

    def _token(self) -> Token:
        token = self._tokens[self._next]
        # The closing token is never consumed, so that look-ahead at the end of the text stays safe.
        if token.kind == "end":
            self.fail("the text ends in the middle of a function")
        self._next += 1
        return token

    def _take(self, kind: str) -> Token:
        token = self._token()
        if token.kind != kind:
            self.fail(f"expected a {kind}, got {token.text!r}")
        return token

    def _accept(self, text: str) -> bool:
        if self._tokens[self._next].text == text:
            self._next += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        token = self._token()
        if token.text != text:
            self.fail(f"{text!r} is expected, got {token.text!r}")
