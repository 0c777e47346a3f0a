"""Bad programs: one error each, which names the line and the value."""

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.ir import Builder, ProgramError, Tensor, gradient, parse, parse_function

HEADER = "func @f(%x: fp32[2, 4] @0, %y: fp32[2, 4] @1, %w: fp32[4, 3] @0, %i: int32[2] @0) {\n"


@pytest.mark.parametrize(
    ("body", "line", "value", "says"),
    [
        ("%a = add(%x, %y)", 2, "a", "%x on device 0, %y on device 1"),
        ("%a = relu(%x)\n%b = matmul(%w, %a)", 3, "b", "cannot be multiplied"),
        ("%a = add(%x, %w)", 2, "a", "cannot be broadcast"),
        ("%a = relu(%b)\n%b = relu(%x)", 2, "b", "before it is defined"),
        ("%a = relu(%x)\n\n%a = relu(%x)", 4, "a", "already defined"),
        ("%a = relu(%x)\n%x = relu(%a)", 3, "x", "already defined"),
        ("%a = rellu(%x)", 2, "a", "unknown op 'rellu'; did you mean"),
        ("%a = relu(%x, %x)", 2, "a", "1 operand needed, 2 given"),
        ("%a, %b = relu(%x)", 2, "a", "1 outputs, but 2 names are given"),
        ("%a = add(%x, %i)", 2, "a", "share one dtype"),
        ("%a @1 = relu(%x)", 2, "a", "is on device 0, not 1"),
        ("%a: fp32[2, 5] @0 = relu(%x)", 2, "a", "is fp32[2, 4] @0, not fp32[2, 5] @0"),
        ("%a = send(%x) {to=0}", 2, "a", "must differ from device"),
        ("%a = send(%x)", 2, "a", "attribute to must have type int"),
        ("%a, %b = all_reduce(%x, %x)", 2, "a", "different devices"),
        ("%s = send(%w) {to=1}\n%a, %b = all_reduce(%x, %s)", 3, "a", "share dtype and shape"),
        ("%a, %b = reduce_scatter(%x, %y) {axis=7}", 2, "a", "axis=7 is not an axis"),
        ("%a = split(%x) {axis=1, parts=3}", 2, "a", "are not divisible into 3"),
        ("%a = reshape(%x) {shape=[3, 3]}", 2, "a", "cannot be reshaped"),
        ("%a = embedding(%w, %x)", 2, "a", "must be integers"),
        ("%a = @g(%x)", 2, "a", "unknown function above 'g'"),
    ],
)
def test_error_names_line_and_value(body: str, line: int, value: str, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(f"{HEADER}{body}\nreturn %x\n}}")
    assert (caught.value.line, caught.value.value) == (line, value)
    assert says in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_value_returned_but_not_defined() -> None:
    with pytest.raises(ProgramError, match=r"@f line 3: %z: is returned but not defined"):
        parse(HEADER + "%a = relu(%x)\nreturn %z\n}")


def test_error_inside_a_callee_names_the_calls_line() -> None:
    text = (
        "func @g(%a, %b) {\n%c = add(%a, %b)\nreturn %c\n}\n"
        + HEADER
        + "%r = @g(%x, %w)\nreturn %r\n}"
    )
    with pytest.raises(ProgramError, match=r"@f line 6: %r: shapes"):
        parse(text)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("%r = @g(%x)", "2 arguments, but 1 are given"),
        ("%r, %q = @g(%x, %x)", "1 results, but 2 are given"),
    ],
)
def test_calls_must_fit(call: str, says: str) -> None:
    text = "func @g(%a, %b) {\n%c = add(%a, %b)\nreturn %c\n}\n" + HEADER + call + "\nreturn %r\n}"
    with pytest.raises(ProgramError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the text has no function"),
        ("func @f() {\n  %a = relu(%x\n", "line 2: the text ends"),
        ("func @f() {\n  a = relu()\n}", "line 2: expected a value, got 'a'"),
        ("func @f(%x: fp32[2]) {\n  %a = relu(%x) $\n}", r"line 2: '\$' is not valid here"),
        (
            "func @f(%x: fp32[2]) {\n%a = relu(%x) | forward speed=3\nreturn %a }",
            "line 2: tags are",
        ),
        ("func @f(%x: fp33[2]) {\nreturn %x }", "unknown dtype 'fp33'"),
        ("func @f(%x: int64[2] = [1, 2, 3]) {\nreturn %x }", "known value has shape"),
    ],
)
def test_text_that_is_no_program(text: str, says: str) -> None:
    with pytest.raises(PerfModelError, match=says):
        parse(text)


def test_builder_checks_as_it_goes() -> None:
    b = Builder("f")
    x = b.parameter("x", Tensor("fp32", (2, 3)))
    with pytest.raises(ProgramError, match="cannot be multiplied"):
        b.op("matmul", x, x)
    with pytest.raises(ProgramError, match="%z: is used by relu before"):
        b.op("relu", "z")


def test_untyped_functions_are_only_for_calls() -> None:
    with pytest.raises(ProgramError, match="%x: has no type"):
        _ = parse_function("func @f(%x) {\n%a = relu(%x)\nreturn %a\n}").types


def test_only_computed_scalars_are_differentiated() -> None:
    function = parse_function(
        "func @f(%x: fp32[2], %s: fp32[]) {\n%y = relu(%x)\n%z = sum(%y) {axes=[0]}\nreturn %z\n}"
    )
    assert gradient(function, "z", ["x"]).outputs == ("z", "d_x")
    for loss in ("y", "s", "nowhere"):
        with pytest.raises(ProgramError, match=f"%{loss}: only a computed scalar"):
            gradient(function, loss, ["x"])
    with pytest.raises(ProgramError, match="%s: %z does not depend on this value"):
        gradient(function, "z", ["s"])
