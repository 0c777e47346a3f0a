"""Every change of one formula of a file that a caller could see: a sign, a term, a factor, a name
for its neighbour.

`mutants.py` draws from these and lets tests judge them. What nobody can see is excluded by the
rules of `_is_invisible`, not by hand.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SWAPPED_NAMES = (
    ("tp", "pp"),
    ("dp", "cp"),
    ("ep", "edp"),
    ("forward", "backward"),
    ("intra_node", "inter_node"),
    ("lo_s", "hi_s"),
    ("weights", "gradients"),
    ("latency_s", "time_s"),
    ("heads", "kv_heads"),
    ("hidden", "ffn_hidden"),
    ("seq_len", "global_batch"),
    ("dtype", "grad_dtype"),
    ("stages", "micro_batches"),
    ("first", "last"),
    ("m", "n"),
)
SWAPPED_CALLS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("floor", "ceil"),
    ("argmin", "argmax"),
    ("any", "all"),
)
SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPPOSITE_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
SHIFTED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}

GUARDS = (1e-9, 1e15)
"""Smaller and larger constants keep divisions and logarithms finite: what they are exactly says
nothing."""
INVISIBLE_KEYWORDS = (
    "strict",
    "copy",
    "maxsize",
    "frozen",
    "eq",
    "kw_only",
    "slots",
    "repr",
    "digits",
    "stacklevel",
    "title",
)
INVISIBLE_CALLS = ("round", "warn", "lru_cache", "report_progress", "cast", "astype")
HAS_TORCH = importlib.util.find_spec("torch") is not None
INVISIBLE_NAMES = (
    "cache",
    "progress",
    "tolerance",
    "rounding",
    "chunk_bytes",
    "most_rounds",
    "most_steps",
)
"""Assignments and functions with these in their names decide how fast an answer comes, how it is
shown, or where a loop ends that has long converged."""


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    room: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    """Of the expression in the file, in bytes."""
    end: int


def mutants_of(room: str, file: str, folder: Path) -> list[Mutant]:
    """Every change of one file below a folder that a caller could see."""
    source = (folder / file).read_bytes()
    starts_of_lines = [0]
    for line in source.splitlines(keepends=True):
        starts_of_lines.append(starts_of_lines[-1] + len(line))
    mutants = []
    for node in _visible_nodes(ast.parse(source)):
        for kind, after in _changes(node):
            start = starts_of_lines[node.lineno - 1] + node.col_offset
            end = starts_of_lines[node.end_lineno - 1] + node.end_col_offset
            before = " ".join(source[start:end].decode().split())
            mutants.append(Mutant(room, file, node.lineno, kind, before, after, start, end))
    return mutants


def _visible_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but for those below an invisible one."""
    for child in _children(tree):
        if not _is_invisible(child):
            yield child
            yield from _visible_nodes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node, without annotations of types and decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_invisible(node: ast.AST) -> bool:
    """Whether no caller sees a change: docstrings, messages, imports, guards, caches, progress,
    rounding for people."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=str(name)):
            return name in INVISIBLE_KEYWORDS
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in INVISIBLE_CALLS or name.endswith(("Error", "Warning"))
        case (
            ast.FunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return _names_speed_or_looks(name)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return _names_speed_or_looks(name)
        case ast.Constant(value=float(value)):
            return value != 0 and not GUARDS[0] < abs(value) < GUARDS[1]
        case ast.Compare(comparators=[ast.Constant(value=str())]):
            return "__name__" in ast.unparse(node)
    return False


def _names_speed_or_looks(name: str) -> bool:
    lowered = name.lower()
    if "torch" in lowered and not HAS_TORCH:
        return True  # nothing here can run it
    return lowered in ("__repr__", "__str__", "__all__") or any(
        part in lowered for part in INVISIBLE_NAMES
    )


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Kinds of changes of an expression, each with what stands in its place."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if not (_is_text(left) or _is_text(right)):
            is_product = isinstance(op, ast.Mult | ast.Div)
            if (other := SWAPPED_OPERATORS.get(type(op))) and not (is_product and _is_one(right)):
                yield "operator", _text(ast.BinOp(left, other(), right))
            if isinstance(op, ast.Add | ast.Sub):
                yield "term dropped", _text(left)
            if isinstance(op, ast.Add):
                yield "term dropped", _text(right)
            if is_product:
                yield "factor of two", f"(2 * {_text(node)})"
            if is_product and not _is_one(right):
                yield "factor dropped", _text(left)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", _text(operand)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "negation", _text(operand)
        case ast.BoolOp(op=op, values=values):
            yield (
                "and or",
                _text(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)),
            )
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if other := OPPOSITE_COMPARISONS.get(type(op)):
                yield "comparison", _text(ast.Compare(left, [other()], [right]))
            # of numbers that are counted, the boundary matters too; nothing lies on a boundary of 0
            # seconds or bytes
            counts = [
                side.value
                for side in (left, right)
                if isinstance(side, ast.Constant) and type(side.value) is int
            ]
            if any(counts) and (other := SHIFTED_COMPARISONS.get(type(op))):
                yield "boundary", _text(ast.Compare(left, [other()], [right]))
        case ast.Call(
            func=ast.Name() | ast.Attribute() as called, args=args, keywords=keywords
        ) if args:
            name = called.id if isinstance(called, ast.Name) else called.attr
            for other in _partners(name, SWAPPED_CALLS):
                yield "min for max", _text(ast.Call(_renamed(called, other), args, keywords))
        case ast.Attribute(attr=name, ctx=ast.Load()):
            for other in _partners(name, SWAPPED_NAMES):
                yield "name", _text(_renamed(node, other))
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", "0.5" if value == 0 else repr(2 * value)


def _is_one(node: ast.AST) -> bool:
    """Whether a factor is 1: dividing by it is multiplying by it (numbers are made floats so)."""
    return isinstance(node, ast.Constant) and node.value == 1 and type(node.value) is not bool


def _is_text(node: ast.AST) -> bool:
    """Whether a sum or product with this operand joins texts or lists."""
    if isinstance(node, ast.Tuple | ast.List | ast.ListComp | ast.JoinedStr | ast.Dict):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _partners(name: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names that this name could be mistaken for."""
    return [b if name == a else a for a, b in pairs if name in (a, b)]


def _renamed(node: ast.Name | ast.Attribute, name: str) -> ast.expr:
    return ast.Name(name) if isinstance(node, ast.Name) else ast.Attribute(node.value, name)


def _text(node: ast.expr) -> str:
    """Text of an expression, in brackets where it needs them."""
    text = ast.unparse(node)
    return (
        text
        if isinstance(node, ast.Constant | ast.Name | ast.Attribute | ast.Call)
        else f"({text})"
    )
