"""The text form parses back to the same program."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.ir import Builder, Function, Tensor, attributes, parse, to_text
from perfmodel.ir.models import (
    Adam,
    TransformerSize,
    mlp,
    training_step,
    transformer_inference,
    transformer_loss,
)

TINY = TransformerSize(layers=2, hidden=8, heads=2, vocab=12, seq_len=4)
NAMES = st.from_regex(r"[A-Za-z_][\w.'~-]{0,6}", fullmatch=True)
SINGLES = ("relu", "gelu", "exp", "softmax")


@st.composite
def functions(draw: st.DrawFn) -> Function:
    """Straight-line programs over a few devices, with all kinds of attributes, tags and names."""
    b = Builder("random")
    shape = (draw(st.integers(1, 3)) * 2, 4)
    values = [
        b.parameter(f"p{d}", Tensor("fp32", shape, d)) for d in range(draw(st.integers(2, 4)))
    ]
    values.append(b.parameter("n", Tensor("int64", (2,), 0, (-1, 3))))
    floats = values[:-1]
    for _ in range(draw(st.integers(0, 12))):
        x = draw(st.sampled_from(floats))
        hint = draw(NAMES)
        device = b.types[x].device
        phase, stream = (
            draw(st.sampled_from(["", "forward", "update"])),
            draw(st.sampled_from(["compute", "send"])),
        )
        with b.tagged(
            phase=phase,
            stream=stream,
            layer=draw(st.integers(-1, 3)),
            micro_batch=draw(st.integers(-1, 3)),
        ):
            match draw(st.integers(0, 3)):
                case 0:
                    floats.append(b.op(draw(st.sampled_from(SINGLES)), x, name=hint))
                case 1:
                    factor = draw(st.floats(allow_nan=False, allow_infinity=False))
                    floats.append(b.op("scale", x, name=hint, factor=factor))
                case 2:
                    floats.append(b.op("send", x, name=hint, to=device + 1))
                case _:
                    other = next((v for v in floats if b.types[v].device != device), None)
                    if other is not None and b.types[other].shape == b.types[x].shape:
                        floats += b.emit(
                            "all_reduce", (x, other), (hint, hint), attributes(op="max")
                        )
    return b.build(draw(st.lists(st.sampled_from(floats), min_size=1, max_size=3)))


@given(functions())
def test_text_parses_back(function: Function) -> None:
    assert parse(to_text(function)).main == function


@pytest.mark.parametrize(
    "program",
    [
        training_step(mlp(8, (4, 6, 4))),
        training_step(transformer_loss(TINY, 4), Adam()),
        transformer_inference(
            TransformerSize(layers=1, hidden=8, heads=2, vocab=12, seq_len=4, experts=2), 2
        ),
    ],
    ids=["mlp", "transformer", "experts"],
)
def test_models_parse_back(program) -> None:
    assert parse(to_text(program.function)).main == program.function


def test_module_with_calls_parses_back() -> None:
    text = """func @g(%a, %b) {
  %c = add(%a, %b)
  return %c
}

func @f(%x: fp32[2] @1) {
  %y = @g(%x, %x) | forward layer=1
  return %y
}
"""
    module = parse(text)
    assert to_text(module) == text
    assert parse(to_text(module)) == module


def test_tag_of_a_call_holds_for_its_body() -> None:
    from perfmodel.ir import inline

    text = "func @g(%a) {\n%c = relu(%a)\nreturn %c\n}\nfunc @f(%x: fp32[2]) {\n%y = @g(%x) | backward\nreturn %y\n}"
    flat, lines = inline(parse(text))
    assert [i.tag.phase for i in flat.instructions] == ["backward"]
    assert [i.outputs for i in flat.instructions] == [("y",)]
    assert lines == [2, 3]


def test_equal_attributes_are_written_as_they_are() -> None:
    """1, 1.0 and true are equal in Python and three values in the text, whichever was written
    first."""
    b = Builder("f")
    x = b.parameter("x", Tensor("fp32", (2,), 0))
    for value in (1, True, 1.0):
        x = b.op("scale", x, factor=value)
    text = to_text(b.build([x]))
    assert re.findall(r"factor=[\w.]+", text) == ["factor=1", "factor=true", "factor=1.0"]
