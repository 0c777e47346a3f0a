"""Abstract interpretation: shapes, known values (DistIR, figure 4) and placement."""

import pytest

from perfmodel.ir import ProgramError, Tensor, parse_function

FIGURE_4 = """func @f(%n: int64[1] @0{known}, %a: fp32[256, 8, 768] @0, %b: fp32[768, 2304] @0) {{
  %shape = shape(%a)
  %two = constant() {{dtype="int64", value=2}}
  %size = take(%shape, %two) {{axis=0}}
  %sizes = unsqueeze(%size) {{axes=[0]}}
  %joined = concat(%n, %sizes) {{axis=0}}
  %flat = reshape(%a, %joined)
  %c = matmul(%flat, %b)
  return %c
}}"""


def test_mixed_interpretation_resolves_dynamic_shapes() -> None:
    types = parse_function(FIGURE_4.format(known=" = [-1]")).types
    assert types["shape"] == Tensor("int64", (3,), 0, (256, 8, 768))
    assert types["size"].value == 768
    assert types["joined"].value == (-1, 768)
    assert types["c"] == Tensor("fp32", (2048, 2304))


def test_abstract_only_interpretation_cannot_and_says_so() -> None:
    with pytest.raises(
        ProgramError, match=r"line 7: %flat: the target shape is not known.*%joined: int64"
    ):
        parse_function(FIGURE_4.format(known=""))


def test_shape_arithmetic_is_evaluated() -> None:
    function = parse_function("""func @f(%a: fp32[6, 4]) {
      %s = shape(%a)
      %one = constant() {dtype="int64", value=1}
      %t = add(%s, %one)
      %u = mul(%t, %t)
      return %u
    }""")
    assert function.types["u"].value == (49, 25)


def test_collectives_place_results() -> None:
    function = parse_function("""func @f(%a: fp32[6, 4] @0, %b: fp32[6, 4] @2) {
      %r_0, %r_1 = all_reduce(%a, %b)
      %g_0, %g_1 = all_gather(%a, %b) {axis=1}
      %s_0, %s_1 = reduce_scatter(%a, %b) {axis=0}
      %t_0, %t_1 = all_to_all(%a, %b) {split_axis=0, concat_axis=1}
      %one = gather(%a, %b) {axis=0, to=2}
      %sum = reduce(%a, %b) {to=0}
      %c_0, %c_1 = broadcast(%a) {to=[1, 3]}
      %p_0, %p_1, %p_2 = scatter(%a) {axis=0, to=[0, 1, 2]}
      %m = send(%a) {to=5}
      return %r_0
    }""")
    shapes = {name: (t.shape, t.device) for name, t in function.types.items()}
    assert shapes["r_1"] == ((6, 4), 2)
    assert shapes["g_0"] == ((6, 8), 0)
    assert shapes["s_1"] == ((3, 4), 2)
    assert shapes["t_0"] == ((3, 8), 0)
    assert shapes["one"] == ((12, 4), 2)
    assert shapes["sum"] == ((6, 4), 0)
    assert shapes["c_1"] == ((6, 4), 3)
    assert shapes["p_2"] == ((2, 4), 2)
    assert shapes["m"] == ((6, 4), 5)
    assert function.n_devices == 6
