"""ONNX graphs and PyTorch modules as programs: their numbers, their gradients, how they distribute,
what is refused."""

import re
from math import prod

import numpy as np
import pytest

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir import Program, parse_program, to_text
from perfmodel.ir.distribute import Degrees, distribute, pad_vocabulary
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.importers import (
    SourceSettings,
    input_value,
    onnx_program,
    read_program,
    torch_program,
)
from perfmodel.ir.importers.foreign_ops import FOREIGN_OPS
from perfmodel.ir.models import training_step

FLOAT, INT64, BOOL = 1, 7, 9
HIDDEN, HEADS, LAYERS, VOCAB, BATCH, SEQ = 16, 4, 2, 30, 4, 6


@pytest.fixture
def onnx():
    return pytest.importorskip("onnx", reason="onnx is not installed (extra: onnx)")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


def gpt2(onnx):
    """As the exporter of Hugging Face's GPT-2 writes it: shapes computed in the graph, a mask by
    Where, a causal mask cut from a constant, joint projections by Gemm on flattened rows, GELU
    spelled out."""
    h, rng = onnx.helper, np.random.default_rng(0)
    nodes, weights = [], []

    def weight(name, *shape):
        weights.append(
            onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 4, name)
        )
        return name

    def known(name, value, kind=np.int64):
        weights.append(onnx.numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    count = 0

    def op(kind, *inputs, n=1, **attributes):
        nonlocal count
        count += 1
        outputs = [f"v{count}_{k}" for k in range(n)]
        nodes.append(h.make_node(kind, inputs, outputs, f"/n{count}/{kind}", **attributes))
        return outputs[0] if n == 1 else outputs

    def norm(x, name):
        centred = op("Sub", x, op("ReduceMean", x, axes=[-1]))
        variance = op(
            "ReduceMean", op("Pow", centred, known(f"{name}.two", 2.0, np.float32)), axes=[-1]
        )
        root = op("Sqrt", op("Add", variance, known(f"{name}.eps", 1e-5, np.float32)))
        scaled = op("Mul", op("Div", centred, root), weight(f"{name}.weight", HIDDEN))
        return op("Add", scaled, weight(f"{name}.bias", HIDDEN))

    def conv1d(x, name, n_in, n_out):
        shape = op("Shape", x)
        lead = op(
            "Slice",
            shape,
            known(f"{name}.0", [0]),
            known(f"{name}.-1", [-1]),
            known(f"{name}.ax", [0]),
        )
        flat = op("Reshape", x, known(f"{name}.flat", [-1, n_in]))
        y = op("Gemm", flat, weight(f"{name}.weight", n_in, n_out), weight(f"{name}.bias", n_out))
        return op("Reshape", y, op("Concat", lead, known(f"{name}.n", [n_out]), axis=0))

    def heads(x, name, order):
        return op(
            "Transpose", op("Reshape", x, known(name, [0, 0, HEADS, HIDDEN // HEADS])), perm=order
        )

    padding = op("Sub", known("one", 1.0, np.float32), op("Cast", "attention_mask", to=FLOAT))
    padding = op(
        "Mul", op("Unsqueeze", padding, known("12", [1, 2])), known("low", -10000.0, np.float32)
    )
    x = op(
        "Add",
        op("Gather", weight("wte.weight", VOCAB, HIDDEN), "input_ids"),
        op("Gather", weight("wpe.weight", 2 * SEQ, HIDDEN), "position_ids"),
    )
    triangle = known("bias", np.tril(np.ones((1, 1, 64, 64))), bool)
    for n in range(LAYERS):
        a = f"h.{n}.attn"
        qkv = conv1d(norm(x, f"h.{n}.ln_1"), f"{a}.c_attn", HIDDEN, 3 * HIDDEN)
        q, k, v = op("Split", qkv, known(f"{a}.sizes", [HIDDEN] * 3), n=3, axis=2)
        q, k, v = (
            heads(y, f"{a}.{i}", p)
            for i, (y, p) in enumerate(((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3])))
        )
        scores = op(
            "Div", op("MatMul", q, k), known(f"{a}.root", (HIDDEN // HEADS) ** 0.5, np.float32)
        )
        length = op(
            "Slice",
            op("Shape", q),
            known(f"{a}.f", [2]),
            known(f"{a}.t", [3]),
            known(f"{a}.g", [0]),
        )
        mask = triangle
        for axis in (2, 3):
            mask = op(
                "Slice", mask, known(f"{a}.z{axis}", [0]), length, known(f"{a}.a{axis}", [axis])
            )
        scores = op("Where", mask, scores, known(f"{a}.lowest", -10000.0, np.float32))
        context = op("MatMul", op("Softmax", op("Add", scores, padding), axis=-1), v)
        merged = op(
            "Reshape", op("Transpose", context, perm=[0, 2, 1, 3]), known(f"{a}.m", [0, 0, HIDDEN])
        )
        x = op("Add", x, conv1d(merged, f"{a}.c_proj", HIDDEN, HIDDEN))
        up = conv1d(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc", HIDDEN, 4 * HIDDEN)
        cubed = op(
            "Add",
            up,
            op(
                "Mul",
                op("Pow", up, known(f"{n}.3", 3.0, np.float32)),
                known(f"{n}.c", 0.044715, np.float32),
            ),
        )
        inner = op("Tanh", op("Mul", cubed, known(f"{n}.s", (2 / np.pi) ** 0.5, np.float32)))
        half = op(
            "Mul",
            op("Mul", up, known(f"{n}.h", 0.5, np.float32)),
            op("Add", inner, known(f"{n}.o", 1.0, np.float32)),
        )
        x = op("Add", x, conv1d(half, f"h.{n}.mlp.c_proj", 4 * HIDDEN, HIDDEN))
    logits = op("MatMul", norm(x, "ln_f"), weight("lm_head", HIDDEN, VOCAB))
    inputs = [
        h.make_tensor_value_info(n, INT64, ["batch", "sequence"])
        for n in ("input_ids", "position_ids", "attention_mask")
    ]
    graph = h.make_graph(
        nodes, "gpt2", inputs, [h.make_tensor_value_info(logits, FLOAT, None)], weights
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 13)])


def read_gpt2(model) -> Program:
    values = {"attention_mask": 1, "position_ids": np.tile(np.arange(SEQ), (BATCH, 1)).tolist()}
    return onnx_program(model, dims={"batch": BATCH, "sequence": SEQ}, values=values)


def weights_of(onnx, model) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_gpt2_of_onnx_computes_what_onnx_s_reference_does(onnx):
    from onnx.reference import ReferenceEvaluator

    model = gpt2(onnx)
    program = read_gpt2(model)
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, SEQ))
    given = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.tile(np.arange(SEQ), (BATCH, 1)),
    }
    (expected,) = ReferenceEvaluator(model).run(None, given)
    arrays = {**weights_of(onnx, model), "input_ids": ids}
    (found,) = execute(program, arrays).values()
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert [w.name for w in program.inputs_of("data")] == ["input_ids"]
    # queries, keys and values are products of their own, which tensor parallelism slices by heads
    axes = {w.name: (w.tensor_axis, len(w.pieces)) for w in program.inputs_of("parameter")}
    assert axes["h.0.attn.c_attn.weight"] == (1, 3)
    assert axes["h.0.attn.c_proj.weight"] == (0, 1)
    assert (axes["h.1.mlp.c_fc.weight"], axes["h.1.mlp.c_proj.weight"]) == ((1, 1), (0, 1))
    spread = distribute(program, Degrees(data=2, tensor=2, pipeline=2, micro_batches=2))
    (distributed,) = execute(spread, arrays).values()
    np.testing.assert_allclose(distributed, expected, rtol=2e-4, atol=2e-5)
    reductions = [i for i in spread.function.instructions if i.op == "all_reduce"]
    # per replica and micro-batch: two a layer, one of embeddings
    assert len(reductions) == 2 * 2 * (2 * LAYERS + 1)
    assert not [i.op for i in spread.function.instructions if i.op in ("all_gather", "all_to_all")]
    assert parse_program(to_text(spread)) == spread


def test_a_mask_may_be_data(onnx):
    from onnx.reference import ReferenceEvaluator

    model = gpt2(onnx)
    rng = np.random.default_rng(2)
    data = {
        "input_ids": rng.integers(0, VOCAB, (BATCH, SEQ)),
        "attention_mask": (np.arange(SEQ) < rng.integers(2, SEQ + 1, (BATCH, 1))).astype(np.int64),
        "position_ids": np.tile(np.arange(SEQ), (BATCH, 1)),
    }
    (expected,) = ReferenceEvaluator(model).run(None, data)
    program = onnx_program(model, dims={"batch": BATCH, "sequence": SEQ})
    arrays = {**weights_of(onnx, model), **data}
    for layout in (Degrees(), Degrees(data=2, tensor=2, pipeline=2, micro_batches=2)):
        (logits,) = execute(distribute(program, layout), arrays).values()
        np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-5)


def test_what_is_not_given_is_named_with_the_remedy(onnx):
    model = gpt2(onnx)
    with pytest.raises(
        PerfModelError,
        match=r"dimension 'batch' is not fixed; give its size \(dims, or --dim batch=N",
    ):
        onnx_program(model)
    with pytest.raises(
        PerfModelError,
        match="no input is named mask; inputs: input_ids, position_ids, attention_mask",
    ):
        onnx_program(model, dims={"batch": BATCH, "sequence": SEQ}, values={"mask": 1})


def gpt(torch, vocab: int = VOCAB, loss: bool = True):
    nn, f = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x):
            batch, seq, hidden = x.shape
            parts = self.qkv(self.norm1(x)).split(hidden, dim=2)
            q, k, v = (p.view(batch, seq, HEADS, -1).transpose(1, 2) for p in parts)
            context = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(context.transpose(1, 2).reshape(batch, seq, hidden))
            return x + self.down(f.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, HIDDEN), nn.Embedding(SEQ, HIDDEN)
            self.h = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, vocab, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids, labels):
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.h:
                x = block(x)
            logits = self.head(self.norm(x))
            return f.cross_entropy(logits.flatten(0, 1), labels.flatten()) if loss else logits

    return Gpt()


def tokens(torch, device: str = "cpu"):
    return tuple(torch.randint(0, VOCAB, (BATCH, SEQ), device=device) for _ in range(2))


@pytest.mark.slow
def test_a_module_of_torch_trains_as_torch_trains_it(torch):
    torch.manual_seed(0)
    module, args = gpt(torch), tokens(torch)
    step = training_step(torch_program(module, args))
    arrays = {n: p.detach().numpy() for n, p in module.named_parameters()}
    arrays |= {"ids": args[0].numpy(), "labels": args[1].numpy()}
    loss = module(*args)
    loss.backward()
    for program in (step, distribute(step, Degrees(data=2, tensor=2, pipeline=2, micro_batches=2))):
        found = execute(program, arrays)
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-6)
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(
                found[f"d_{name}"], parameter.grad.numpy(), rtol=1e-3, atol=1e-6
            )


def test_weights_need_no_values(torch):
    with torch.device("meta"):
        module = gpt(torch)
    program = torch_program(module, tokens(torch, "meta"))
    assert program == torch_program(gpt(torch), tokens(torch))


def test_vocabularies_are_padded(torch):
    program = torch_program(gpt(torch, 29, loss=False), tokens(torch))
    with pytest.raises(LayoutError, match=r"29 is not divisible by 2 devices.*--pad-vocab"):
        distribute(program, Degrees(tensor=2))
    padded = pad_vocabulary(program, 4)
    assert {w.name: w.shape for w in padded.inputs}["wte.weight"] == (32, HIDDEN)
    arrays = random_inputs(program)
    arrays["ids"] %= 29
    rows = np.concatenate([arrays["wte.weight"], np.zeros((3, HIDDEN))])
    (expected,), (found,) = (
        execute(p, arrays | extra).values()
        for p, extra in (
            (program, {}),
            (distribute(padded, Degrees(tensor=4)), {"wte.weight": rows}),
        )
    )
    np.testing.assert_allclose(found[..., :29], expected, rtol=1e-4, atol=1e-5)


OPS_OF_TORCH = {
    "grouped queries": lambda t, x: t.nn.functional.scaled_dot_product_attention(
        x.view(2, 4, 3, 2),
        x[:, :6].reshape(2, 2, 3, 2),
        x[:, 6:].reshape(2, 2, 3, 2),
        is_causal=True,
        enable_gqa=True,
    ),
    "rms_norm": lambda t, x: t.nn.functional.rms_norm(x, (2,)),
    "layer_norm": lambda t, x: t.nn.functional.layer_norm(x, (2,)),
    "silu, clamp": lambda t, x: t.nn.functional.silu(x).clamp(-0.1, 0.2),
    "masked": lambda t, x: (
        x.masked_fill(t.arange(2) > 0, 3.0) + t.where(t.arange(12)[:, None] < 4, x, -1.0)
    ),
    "stack": lambda t, x: t.stack([x, x * x], 1).permute(0, 2, 1, 3)[:, 2:7, 1],
    "chunks": lambda t, x: t.cat(
        [a / (b + 10) for a, b in zip(x.chunk(3, 1), x.split(4, 1), strict=True)], 2
    ),
    "means": lambda t, x: x.mean((1, 2), keepdim=True) - x.sum(1, keepdim=True) ** 3,
    "softmax": lambda t, x: x.softmax(1) + x.log_softmax(-1),
    "expand": lambda t, x: x.unsqueeze(1).expand(2, 3, 12, 2).flatten(1, 2) @ t.ones(2, 5) * 0.5,
    "top k": lambda t, x: t.topk(x, 2, 1)[0] * t.topk(x, 2, dim=1, largest=False)[0],
    "places": lambda t, x: t.topk(x, 3, 1)[1],
    "argmax": lambda t, x: x.argmax(1),
    "argmin": lambda t, x: x.argmin(-1, keepdim=True),
    "argmax of all": lambda t, x: x.argmax(),
    "repeats": lambda t, x: (
        x.repeat_interleave(3, 1)[:, 5:20] + x.repeat_interleave(15, 2)[:, :1, :2]
    ),
    "in place": lambda t, x: (x * 2).div_(x + 10).mul_(x),
    "roots": lambda t, x: (
        (x * x + 1).rsqrt() + (x * x).sqrt() + x.tanh().sigmoid() - x.exp().reciprocal()
    ),
}


OPS_OF_TOKENS = {
    "positions without padding": lambda t, ids: (
        (ids.ne(1).int().cumsum(1).type_as(ids) * ids.ne(1)).long() + 1
    ),
    "padding": lambda t, ids: ids * 3 + (ids == 2).logical_not().long() - 0,
    "running sum of rows": lambda t, ids: ids.cumsum(0),
}


@pytest.mark.parametrize("name", OPS_OF_TOKENS)
def test_integers_are_computed_as_torch_does(torch, name):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(64, 4)

        def forward(self, ids):
            return self.table(OPS_OF_TOKENS[name](torch, ids))

    ids = torch.randint(0, 4, (4, 6))
    module = Module()
    program = torch_program(module, (ids,))
    arrays = {"ids": ids.numpy(), "table.weight": module.table.weight.detach().numpy()}
    expected = module(ids).detach().numpy()
    for degrees in (Degrees(), Degrees(data=2), Degrees(tensor=2)):
        (result,) = execute(distribute(program, degrees), arrays).values()
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_each_token_takes_the_weights_of_its_expert(torch):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.randn(4, 6, 2))

        def forward(self, x, ids):
            weights = self.experts[ids.reshape(-1)]
            return ((weights @ x.reshape(-1, 2, 1)) ** 2).mean()

    module, x, ids = Module(), torch.randn(4, 3, 2), torch.randint(0, 4, (4, 3))
    step = training_step(torch_program(module, (x, ids)))
    arrays = {"x": x.numpy(), "ids": ids.numpy(), "experts": module.experts.detach().numpy()}
    loss = module(x, ids)
    loss.backward()
    for degrees in (Degrees(), Degrees(data=2, zero=1), Degrees(tensor=2)):
        results = execute(distribute(step, degrees), arrays)
        np.testing.assert_allclose(
            results["d_experts"], module.experts.grad.numpy(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("name", OPS_OF_TORCH)
def test_ops_of_torch(torch, name):
    class Module(torch.nn.Module):
        def forward(self, x):
            return OPS_OF_TORCH[name](torch, x)

    x = torch.rand(2, 12, 2) - 0.3
    (found,) = execute(torch_program(Module(), (x,)), {"x": x.numpy()}).values()
    np.testing.assert_allclose(found, Module()(x).numpy(), rtol=2e-5, atol=1e-6)


def test_unknown_ops_are_all_named_in_one_line(torch):
    class Module(torch.nn.Module):
        def forward(self, x):
            return torch.cumprod(x, 0).sort(0)[0] + torch.lgamma(x)

    with pytest.raises(PerfModelError) as error:
        torch_program(Module(), (torch.rand(3, 2),))
    assert re.search(
        r"cumprod \(1x, first at cumprod\): the IR has no .*lgamma \(1x.*import-model",
        str(error.value),
    )
    assert "\n" not in str(error.value)


def grouped(torch, weights, rows, experts):
    """Products of sorted rows with their experts' weights."""
    counts = torch.histc(experts.float(), weights.shape[0], 0, weights.shape[0] - 1).cumsum(
        0, dtype=torch.int32
    )
    return torch._grouped_mm(rows, weights, counts)


SORTED_USES = {
    "results stay sorted": lambda torch, rows, order: rows.square().sum(0).max(),
    "rows are added up in their order": lambda torch, rows, order: rows.cumsum(0)[
        torch.argsort(order)
    ].sum(),
    "rows are put elsewhere": lambda torch, rows, order: rows[order].square().sum(),
}


@pytest.mark.parametrize("use", SORTED_USES)
def test_sorted_rows_whose_order_counts_are_refused_in_one_line(torch, use):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.randn(4, 16, 16, dtype=torch.bfloat16))

        def forward(self, x, ids):
            experts, order = torch.sort(ids)
            return SORTED_USES[use](torch, grouped(torch, self.experts, x[order], experts), order)

    inputs = (torch.randn(8, 16, dtype=torch.bfloat16), torch.randint(0, 4, (8,)))
    with pytest.raises(
        PerfModelError, match=r"sort .*experts_implementation='batched_mm'"
    ) as error:
        torch_program(Module(), inputs)
    assert "--input-value" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("back", ["argsort", "index_put"])
@pytest.mark.parametrize("transposed", [True, False])
def test_sorted_rows_that_are_put_back_are_those_of_each_expert(torch, back, transposed):
    """Four experts, two for each of six tokens, with a bias for each expert and a gate for each
    row."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.randn(4, 16, 16, dtype=torch.bfloat16))
            self.bias = torch.nn.Parameter(torch.randn(4, 16, dtype=torch.bfloat16))

        def forward(self, x, ids, gates):
            experts, order = torch.sort(ids.reshape(-1))
            weights = self.experts.transpose(1, 2) if transposed else self.experts
            rows = grouped(torch, weights, x[order // 2], experts) + self.bias[experts]
            rows = torch.nn.functional.silu(rows) * gates.reshape(-1)[order].unsqueeze(-1)
            inverse = torch.argsort(order)
            if back == "index_put":
                inverse = torch.empty_like(order)
                inverse[order] = torch.arange(12)
            return rows[inverse].view(6, 2, 16).sum(1)

    module = Module()
    x, gates = torch.randn(6, 16, dtype=torch.bfloat16), torch.rand(6, 2, dtype=torch.bfloat16)
    ids = torch.tensor([[3, 0], [0, 1], [3, 1], [0, 3], [1, 3], [3, 0]])  # nobody takes the third
    program = torch_program(module, (x, ids, gates))
    assert "top_k" not in {instruction.op for instruction in program.function.instructions}
    arrays = {"x": x.float().numpy(), "ids": ids.numpy(), "gates": gates.float().numpy()}
    arrays |= {name: value.detach().float().numpy() for name, value in module.named_parameters()}
    (result,) = execute(program, arrays).values()
    expected = module(x, ids, gates).detach().float().numpy()
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=3e-2, atol=3e-2)


def test_a_module_without_names_is_cut_at_its_products(torch):
    layers = [torch.nn.Linear(6, 6) for _ in range(4)]

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = layers

        def forward(self, x):
            return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())

    program = torch_program(Module(), (torch.rand(8, 6),))
    assert sorted({i.tag.layer for i in program.function.instructions}) == [0, 1, 2, 3]
    assert distribute(program, Degrees(pipeline=4, micro_batches=2)).n_devices == 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing", "nothing: not program.ir, a catalog model"),
        ("gpt2-1.6b", "give --global-batch"),
        ("llama-7b", "only MLPs and GPT-2's architecture"),
    ],
)
def test_sources_that_are_none(source, says):
    batch = None if "give" in says else 8
    with pytest.raises(PerfModelError, match=re.escape(says)):
        read_program(source, SourceSettings(batch=batch))


def test_a_catalog_model_has_the_parameters_of_the_catalog():
    program = read_program(
        "gpt2-1.6b", SourceSettings(batch=2, seq_len=8, mode="inference", dtype="fp16")
    )
    assert sum(prod(w.shape) for w in program.inputs_of("parameter")) == pytest.approx(
        1.3e9, rel=0.3
    )


def test_values_on_the_command_line(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(3))
    assert input_value("mask=1") == ("mask", 1)
    assert input_value("ids=[[0, 1]]") == ("ids", [[0, 1]])
    assert input_value(f"x={tmp_path}/ids.npy")[1].tolist() == [0, 1, 2]
    with pytest.raises(PerfModelError, match="is not NAME=VALUE"):
        input_value("x=what")


WORDS_OF_OTHERS = {
    "x": "self input tensor data x a c weight",  # `weight`: the table of an embedding
    "a": "self a mat1 batch1",
    "b": "other b mat2 batch2",
    "target": "other target target_type",
    "bound": "other b",
    "if_true": "self x",
    "if_false": "other y",
    "source": "src value",
    "part": "src updates",
    "parts": "tensors inputs",
    "values": "data_0",
    "logits": "self scores",
    "labels": "target labels",
    "class_weights": "weight weights",
    "gain": "weight scale",
    "weight": "weight w",
    "bias": "bias b",
    "shift": "bias b",
    "mean": "running_mean input_mean",
    "variance": "running_var input_var",
    "training_mode": "training",
    "by_input_statistics": "use_input_stats",
    "epsilon": "eps",
    "normalised_shape": "normalized_shape",
    "axis": "dim axis",
    "axes": "dim dims axes",
    "perm": "dims",
    "first": "dim0",
    "second": "dim1",
    "keepdims": "keepdim",
    "shape": "shape size",
    "size": "output_size",
    "start": "start start_dim",
    "end": "end end_dim",
    "starts": "start starts",
    "ends": "end ends",
    "steps": "step steps",
    "indices": "index indices",
    "split": "split split_size split_sizes",
    "exponent": "exponent y",
    "value": "value constant_value",
    "pads": "pad pads",
    "padding": "padding padding_idx",
    "strides": "stride",
    "dilations": "dilation",
    "group": "groups",
    "kernel_shape": "kernel_size",
    "divisor": "divisor_override",
    "mask": "mask attn_mask",
    "dropout": "dropout_p",
    "causal": "is_causal",
    "reduction": "reduction reduce_op",
    "received_sizes": "output_split_sizes",
    "sent_sizes": "input_split_sizes",
}
"""What ONNX and ATen call an operand that our table calls so, where that is not the same word."""


def assert_in_order(name: str, operands: tuple[str, ...], foreign_operands: list[str]) -> None:
    """Each operand of our table stands where the foreign op has it."""
    assert len(operands) <= len(foreign_operands), name
    for operand, foreign in zip(operands, foreign_operands, strict=False):
        word = operand.removeprefix("*")
        assert foreign.lower() in WORDS_OF_OTHERS.get(word, word).split(), (name, operand, foreign)


def test_operands_stand_where_torch_has_them(torch):
    checked = 0
    for name, op in FOREIGN_OPS.items():
        namespace, _, rest = name.rpartition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
        if packet is not None:
            schema = getattr(packet, overload or "default")._schema
            assert_in_order(name, op.operands, [argument.name for argument in schema.arguments])
            checked += 1
    assert checked > 100


def test_operands_stand_where_onnx_has_them(onnx):
    checked = 0
    for name, op in FOREIGN_OPS.items():
        if onnx.defs.has(name):
            inputs = onnx.defs.get_schema(name).inputs
            assert_in_order(name, op.operands, [operand.name for operand in inputs])
            checked += 1
    assert checked > 50


def test_a_norm_over_several_axes_is_refused_without_a_gain_too(torch):
    class Norm(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.layer_norm(x, x.shape[-2:])

    with pytest.raises(PerfModelError, match="a norm over several axes"):
        torch_program(Norm(), (torch.zeros(2, 3, 4),))
