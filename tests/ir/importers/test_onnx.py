"""ONNX graphs: products, convolutions, attention, chains, shapes computed in the graph, bad
input."""

import sys
from math import prod

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.ir.importers import read_onnx


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(PerfModelError, match=r"install perfmodel\[onnx\]"):
        read_onnx("model.onnx")


@pytest.fixture
def h():
    return pytest.importorskip("onnx").helper


FLOAT, INT64 = 1, 7


def model(h, nodes, inputs, outputs, weights=()):
    tensors = [h.make_tensor(n, FLOAT, shape, [0.0] * prod(shape)) for n, shape in weights]
    return h.make_model(
        h.make_graph(
            nodes,
            "net",
            [h.make_tensor_value_info(n, kind, shape) for n, kind, shape in inputs],
            [h.make_tensor_value_info(n, FLOAT, None) for n in outputs],
            tensors,
        )
    )


def mlp(h, batch):
    nodes = [
        h.make_node("Gather", ["table", "ids"], ["x"]),
        h.make_node("LayerNormalization", ["x", "gain", "bias"], ["y"]),
        h.make_node("MatMul", ["y", "w"], ["z"]),
        h.make_node("Add", ["z", "b"], ["za"]),
        h.make_node("Relu", ["za"], ["zr"]),
        h.make_node("Shape", ["zr"], ["s"]),
        h.make_node("Reshape", ["zr", "s"], ["zz"]),
        h.make_node("Gemm", ["flat", "w"], ["g"]),
    ]
    nodes.insert(7, h.make_node("Flatten", ["x"], ["flat"], axis=2))
    weights = [("table", (10, 8)), ("gain", (8,)), ("bias", (8,)), ("w", (8, 16)), ("b", (16,))]
    return model(h, nodes, [("ids", INT64, (batch, 3))], ["zz", "g"], weights)


def test_a_small_network(h):
    table = read_onnx(mlp(h, "batch"), dims={"batch": 4})
    kinds = {k.source: k for k in table.kernels}
    assert table.matmul_flops == 2 * (2 * 12 * 8 * 16)
    assert (kinds["MatMul"].op.m, kinds["MatMul"].op.n, kinds["MatMul"].op.k) == (12, 16, 8)
    assert (kinds["Gather"].op.family, kinds["Gather"].op.tokens) == ("embedding", 12)
    assert kinds["LayerNormalization"].op.op == "layer_norm"
    # bias and ReLU are one kernel; the reshape to a computed shape costs nothing
    assert kinds["Add+Relu"].bytes == 4 * (2 * 12 * 16 + 16)
    assert len(table.kernels) == 5
    assert table.unmapped == ()
    assert table.predict("a100-sxm-80gb").step_time_s > 0


def test_what_follows_from_weights_alone_is_computed_once(h):
    """ONNX Runtime folds it when it loads the model; data that meet a folded weight still cost what
    they do."""
    nodes = [
        h.make_node("Cast", ["w"], ["w64"], to=11),
        h.make_node("Cast", ["w64"], ["w32"], to=FLOAT),
        h.make_node("Transpose", ["w32"], ["wt"]),
        h.make_node("Mul", ["wt", "scale"], ["ws"]),
        h.make_node("MatMul", ["x", "ws"], ["y"]),
        h.make_node("Mul", ["y", "scale"], ["z"]),
    ]
    weights = [("w", (16, 8)), ("scale", (16,))]
    table = read_onnx(model(h, nodes, [("x", FLOAT, (4, 8))], ["z"], weights))
    assert [kernel.source for kernel in table.kernels] == ["MatMul", "Mul"]
    assert table.kernels[0].bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    # a weight that callers may replace is data
    replaceable = [("x", FLOAT, (4, 8)), ("w", FLOAT, (16, 8))]
    assert len(read_onnx(model(h, nodes, replaceable, ["z"], weights)).kernels) > 2


def test_convolution_and_attention(h):
    nodes = [
        h.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2], group=2),
        h.make_node("Attention", ["q", "q", "q"], ["o"], is_causal=1),
        h.make_node("NonZero", ["o"], ["n"]),
    ]
    inputs = [("x", FLOAT, (2, 4, 9, 9)), ("q", FLOAT, (2, 3, 8, 16))]
    net = model(h, nodes[:2], inputs, ["c", "o"], [("k", (6, 2, 3, 3))])
    net.opset_import[0].version = 23
    ops = {k.op.family: k.op for k in read_onnx(net).kernels}
    assert (ops["conv"].h_out, ops["conv"].groups, ops["conv"].stride_h) == (5, 2, 2)
    assert (ops["attention"].heads, ops["attention"].head_dim, ops["attention"].causal) == (
        3,
        16,
        True,
    )
    net = model(h, nodes, inputs, ["c", "n"], [("k", (6, 2, 3, 3))])
    net.opset_import[0].version = 23
    with pytest.raises(PerfModelError, match="depends on data"):
        read_onnx(net)


def test_an_operator_without_a_kernel_is_named(h):
    nodes = [h.make_node("Det", ["x"], ["d"]), h.make_node("MatMul", ["x", "x"], ["y"])]
    table = read_onnx(model(h, nodes, [("x", FLOAT, (5, 4, 4))], ["d", "y"]))
    assert [u.name for u in table.unmapped] == ["Det"]
    assert table.unmapped_share == pytest.approx(5 / (5 + 5 * 2 * 4**3))


def test_bad_models(h, tmp_path):
    with pytest.raises(PerfModelError, match="input ids: dimension 'batch' is not fixed"):
        read_onnx(mlp(h, "batch"))
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(PerfModelError, match=r"broken\.onnx: not a readable ONNX model"):
        read_onnx(path)
    strange = model(
        h, [h.make_node("Foo", ["x"], ["y"], domain="mine")], [("x", FLOAT, (2, 2))], ["y"]
    )
    with pytest.raises(PerfModelError, match="Foo"):
        read_onnx(strange)
