"""One rank of a tensor-parallel module of PyTorch as the program of all ranks: numbers, time, what
is refused."""

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir import OPS, Program, parse_function, parse_program, to_text, undistributed, work
from perfmodel.ir.distribute import Degrees, all_ranks, distribute
from perfmodel.ir.execution import (
    cluster_timer,
    execute,
    program_ranks,
    program_structure,
    random_inputs,
    run,
    simulate,
)
from perfmodel.ir.importers import rank_program, torch_program
from perfmodel.ir.models import training_step
from perfmodel.ops import Collective

RANKS, SEQ, BATCH, HIDDEN, HEADS = 2, 6, 2, 16, 4


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """Torch, in a world of two ranks of which this process is the first; its collectives do
    nothing."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield torch
    torch.distributed.destroy_process_group()


def mappings(torch: Any) -> tuple[Any, Any, Any]:
    """Megatron-LM's functions between parallel regions, as
    megatron/core/tensor_parallel/mappings.py has them."""

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.contiguous()
            torch.distributed.all_reduce(x)
            return x

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            gathered = torch.empty(
                [x.shape[0] * RANKS, *x.shape[1:]], dtype=x.dtype, device=x.device
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # new names in torch 2.13
                torch.distributed.all_gather_into_tensor(gathered, x.contiguous())
            return gathered

    class ReduceScatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            part = torch.empty([x.shape[0] // RANKS, *x.shape[1:]], dtype=x.dtype, device=x.device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.distributed.reduce_scatter_tensor(part, x.contiguous())
            return part

    return Reduce, Gather, ReduceScatter


def stage(torch: Any, ranks: int, *, sequence_parallel: bool = False) -> Any:
    """A layer as Megatron-LM writes it: columns of the first products and rows of the second ones
    on every rank."""
    nn, f = torch.nn, torch.nn.functional
    reduce, gather, reduce_scatter = mappings(torch)
    torch.manual_seed(0)

    def weight(shape: tuple[int, ...], axis: int | None = None) -> Any:
        whole = torch.randn(shape) / 4
        if axis is None:
            return nn.Parameter(whole)
        part = nn.Parameter(whole.narrow(axis, 0, shape[axis] // ranks).clone())
        part.tensor_model_parallel, part.partition_dim = True, axis
        return part

    def before(x: Any) -> Any:
        if ranks == 1 or not sequence_parallel:
            return x
        return gather.apply(x)

    def after(x: Any) -> Any:
        if ranks == 1:
            return x
        return reduce_scatter.apply(x) if sequence_parallel else reduce.apply(x)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.qkv = weight((3 * HIDDEN, HIDDEN), 0)
            self.qkv_bias = weight((3 * HIDDEN,), 0)
            self.proj = weight((HIDDEN, HIDDEN), 1)
            self.proj_bias = weight((HIDDEN,))
            self.up = weight((4 * HIDDEN, HIDDEN), 0)
            self.down = weight((HIDDEN, 4 * HIDDEN), 1)

        def forward(self, x: Any) -> Any:
            h = before(self.norm(x))
            q, k, v = f.linear(h, self.qkv, self.qkv_bias).chunk(3, -1)
            q, k, v = (
                y.view(SEQ, BATCH, HEADS // ranks, -1).permute(1, 2, 0, 3) for y in (q, k, v)
            )
            h = (
                f.scaled_dot_product_attention(q, k, v, is_causal=True)
                .permute(2, 0, 1, 3)
                .flatten(2)
            )
            x = x + after(f.linear(h, self.proj)) + self.proj_bias
            h = before(self.norm(x))
            return x + after(f.linear(f.gelu(f.linear(h, self.up)), self.down))

    return Stage()


def whole_inputs(torch: Any) -> dict[str, np.ndarray]:
    arrays = {name: value.detach().numpy() for name, value in stage(torch, 1).named_parameters()}
    return arrays | {
        "x": np.random.default_rng(1).standard_normal((SEQ, BATCH, HIDDEN)).astype(np.float32)
    }


def whole_module(torch: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The whole module, its joint projection put together from the ranks' own ones."""
    module = stage(torch, 1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            array = arrays[name]
            if name.startswith("qkv"):
                by_rank = array.reshape(RANKS, 3, HIDDEN // RANKS, -1)
                array = by_rank.swapaxes(0, 1).reshape(array.shape)
            parameter.copy_(torch.from_numpy(array))
    return module


def expected(torch: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """What the whole module computes."""
    with torch.no_grad():
        return whole_module(torch, arrays)(torch.from_numpy(arrays["x"])).numpy()


def trained(torch: Any, *, sequence_parallel: bool = False) -> tuple[Program, int]:
    """The training step of all ranks, and how many collectives its forward pass has."""
    layer = stage(torch, RANKS, sequence_parallel=sequence_parallel)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, parameter in layer.named_parameters(recurse=False):
                setattr(self, name, parameter)
            self.norm = layer.norm

        def forward(self, x: Any) -> Any:
            return type(layer).forward(self, x).square().mean()

    slices = RANKS if sequence_parallel else 1
    x, sharded = torch.zeros(SEQ // slices, BATCH, HIDDEN), {"x": 0} if sequence_parallel else {}
    forward = rank_program(Loss(), (x,), ranks=RANKS, sharded=sharded)
    step = rank_program(Loss(), (x,), ranks=RANKS, sharded=sharded, trains=None)
    return step, sum(OPS[i.op].collective for i in forward.function.instructions)


def assert_trains(
    torch: Any, arrays: dict[str, np.ndarray], results: dict[str, np.ndarray]
) -> None:
    """The step's loss, gradients and new parameters are those of the whole module, by torch."""
    module = whole_module(torch, arrays)
    loss = module(torch.from_numpy(arrays["x"])).square().mean()
    loss.backward()
    for name, parameter in module.named_parameters():
        gradient = parameter.grad.numpy()
        if name.startswith("qkv"):
            by_product = gradient.reshape(3, RANKS, HIDDEN // RANKS, -1)
            gradient = by_product.swapaxes(0, 1).reshape(gradient.shape)
        np.testing.assert_allclose(results.pop(f"d_{name}"), gradient, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(
            results.pop(name), arrays[name] - 0.1 * gradient, rtol=1e-3, atol=1e-5
        )
    (loss_of_ranks,) = results.values()
    assert loss_of_ranks == pytest.approx(float(loss.detach()), rel=1e-4)


@pytest.fixture(scope="module")
def program(torch: Any) -> Program:
    return rank_program(stage(torch, RANKS), (torch.zeros(SEQ, BATCH, HIDDEN),), ranks=RANKS)


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.integers(2, 4),
    rows=st.integers(1, 3),
    inner=st.integers(1, 3),
    columns=st.integers(1, 3),
    slices=st.booleans(),
)
def test_rows_of_a_weight_on_many_ranks(
    ranks: int, rows: int, inner: int, columns: int, slices: bool
) -> None:
    """x w is the sum over ranks of columns of x times rows of w, on all of them or a slice on
    each."""
    collective = "reduce_scatter" if slices else "all_reduce"
    axis = "axis=0, " if slices else ""
    text = f"""func @f(%x: fp64[{rows * ranks}, {inner}] @0, %w: fp64[{inner}, {columns}] @0) {{
  %y = matmul(%x, %w)
  %z = {collective}(%y) {{{axis}replicas=[{ranks}, 1]}}
  return %z
}}"""
    alone = undistributed(parse_function(text))
    program = all_ranks(alone, ranks, {"x": 1, "w": 0} | ({"z": 0} if slices else {}))
    arrays = random_inputs(program)
    assert arrays["x"].shape == (rows * ranks, inner * ranks)
    (found,) = execute(program, arrays).values()
    np.testing.assert_allclose(found, arrays["x"] @ arrays["w"], rtol=1e-12)


def test_all_ranks_together_compute_what_the_whole_module_does(
    torch: Any, program: Program
) -> None:
    assert program.n_devices == RANKS
    shapes = {tensor.name: tensor.shape for tensor in program.inputs}
    arrays = whole_inputs(torch)
    assert shapes == {name: array.shape for name, array in arrays.items()}
    (found,) = execute(program, arrays).values()
    np.testing.assert_allclose(found, expected(torch, arrays), rtol=1e-4, atol=1e-5)
    assert (
        execute(parse_program(to_text(program)), arrays).keys() == execute(program, arrays).keys()
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_all_ranks_together_train_as_the_whole_module_does(
    torch: Any, sequence_parallel: bool
) -> None:
    """A backward pass has as many collectives of activations as the forward pass (Shoeybi et al.
    2019; Korthikanti et al. 2022), but that the gradient by the layer's input is not asked for;
    slices of the sequence add one for each parameter that all ranks hold."""
    step, of_forward = trained(torch, sequence_parallel=sequence_parallel)
    arrays = whole_inputs(torch)
    backward = [
        i for i in step.function.instructions if i.tag.phase == "backward" and OPS[i.op].collective
    ]
    alike = 3 if sequence_parallel else 0
    assert len(backward) == of_forward + alike
    assert_trains(torch, arrays, execute(step, arrays))


def communication(program: Program) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """Collectives of a program, by kind, phase and shape."""
    collectives = [i for i in program.function.instructions if OPS[i.op].collective]
    return Counter((i.op, i.tag.phase, program.types[i.inputs[0]].shape) for i in collectives)


def test_trained_ranks_do_what_the_distributed_whole_does(torch: Any) -> None:
    """Read from one rank's module or made by the transform of a whole one, a tensor-parallel step
    is the same work."""
    of_ranks, _ = trained(torch)
    whole = stage(torch, 1)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = whole

        def forward(self, x: Any) -> Any:
            return self.stage(x).square().mean()

    sequential = training_step(torch_program(Loss(), (torch.zeros(SEQ, BATCH, HIDDEN),)))
    distributed = distribute(sequential, Degrees(tensor=RANKS))
    assert communication(of_ranks) == communication(distributed)
    assert work(of_ranks.function).flops.tolist() == work(distributed.function).flops.tolist()


@pytest.mark.slow
def test_real_ranks_train_too(torch: Any) -> None:
    step, _ = trained(torch)
    arrays = whole_inputs(torch)
    with program_ranks(RANKS, "torch") as ranks:
        result = run(step, arrays, repeats=1, ranks=ranks)
    assert_trains(torch, arrays, dict(result.outputs))


@pytest.mark.slow
def test_real_ranks_compute_it_too(torch: Any, program: Program) -> None:
    arrays = whole_inputs(torch)
    with program_ranks(RANKS, "torch") as ranks:
        result = run(program, arrays, repeats=1, ranks=ranks)
    (found,) = result.outputs.values()
    np.testing.assert_allclose(found, expected(torch, arrays), rtol=1e-4, atol=1e-5)


def test_ranks_that_hold_slices_of_the_sequence(torch: Any) -> None:
    """Megatron's sequence parallelism: all-gathers before the first products, reduce-scatters after
    the second."""
    module, x = (
        stage(torch, RANKS, sequence_parallel=True),
        torch.zeros(SEQ // RANKS, BATCH, HIDDEN),
    )
    (output,) = torch_program(module, (x,), ranks=RANKS).outputs
    program = rank_program(module, (x,), ranks=RANKS, sharded={"x": 0, output.name: 0})
    kinds = [
        i.op
        for i in program.function.instructions
        if i.op in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    assert kinds == ["all_gather", "reduce_scatter"] * 2
    arrays = whole_inputs(torch)
    (found,) = execute(program, arrays).values()
    np.testing.assert_allclose(found, expected(torch, arrays), rtol=1e-4, atol=1e-5)


def joined(x: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(np.split(x, RANKS), axis)


FUNCTIONAL = {
    "sum": (lambda c, x, world: c.all_reduce(x, "sum", world), None, lambda x: x[:4] + x[4:]),
    "mean": (
        lambda c, x, world: c.all_reduce(x, "avg", world),
        None,
        lambda x: (x[:4] + x[4:]) / 2,
    ),
    "maximum": (
        lambda c, x, world: c.all_reduce(x, "max", world),
        None,
        lambda x: np.maximum(x[:4], x[4:]),
    ),
    "gather": (lambda c, x, world: c.all_gather_tensor(x, 0, world), None, lambda x: x),
    "gather, last axis": (
        lambda c, x, world: c.all_gather_tensor(x, 1, world),
        None,
        lambda x: joined(x, 1),
    ),
    "scatter": (
        lambda c, x, world: c.reduce_scatter_tensor(x, "sum", 0, world),
        0,
        lambda x: x[:4] + x[4:],
    ),
    "scatter, last axis": (
        lambda c, x, world: c.reduce_scatter_tensor(x, "sum", 1, world),
        1,
        lambda x: x[:4] + x[4:],
    ),
    "all-to-all": (
        lambda c, x, world: c.all_to_all_single(x, None, None, world),
        0,
        lambda x: np.concatenate([x[:2], x[4:6], x[2:4], x[6:]]),
    ),
}
"""Collective of a rank's slice, axis along which ranks hold the result (None: all of it), and the
whole of it."""


@pytest.mark.parametrize("kind", FUNCTIONAL)
def test_functional_collectives(torch: Any, kind: str) -> None:
    collective, axis, of_whole = FUNCTIONAL[kind]

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return collective(
                torch.distributed._functional_collectives, x, torch.distributed.group.WORLD
            )

    part = torch.zeros(4, 6)
    (output,) = torch_program(Module(), (part,), ranks=RANKS).outputs
    sharded = {"x": 0} if axis is None else {"x": 0, output.name: axis}
    program = rank_program(Module(), (part,), ranks=RANKS, sharded=sharded)
    x = np.random.default_rng(0).standard_normal((8, 6))
    (found,) = execute(program, {"x": x}).values()
    np.testing.assert_allclose(found, of_whole(x), rtol=1e-6)


def test_an_exported_module_is_read_too(torch: Any, program: Program) -> None:
    exported = torch.export.export(stage(torch, RANKS), (torch.zeros(SEQ, BATCH, HIDDEN),))
    axes = {"qkv": 0, "qkv_bias": 0, "proj": 1, "up": 0, "down": 1}
    assert rank_program(exported, ranks=RANKS, sharded=axes, name="Stage") == program


def test_one_rank_is_priced_as_all_of_them(torch: Any, program: Program) -> None:
    """And two all-reduces of the activations in fp32, as Shoeybi et al. 2019 count them."""
    alone = torch_program(stage(torch, RANKS), (torch.zeros(SEQ, BATCH, HIDDEN),), ranks=RANKS)
    cluster = catalog.cluster("dgx-a100")
    timer = cluster_timer(cluster)
    times_s = []
    for function in (alone.function, program.function):
        structure = program_structure(function, cluster)
        sent = [op for _, work in structure.events for op in work if isinstance(op, Collective)]
        assert {(op.collective, op.bytes, op.num_ranks) for op in sent} == {
            ("all_reduce", 4.0 * SEQ * BATCH * HIDDEN, RANKS)
        }
        times_s.append(simulate(structure, timer).makespan_s)
    assert times_s[0] == pytest.approx(times_s[1], rel=1e-9)
    assert sum(i.op == "all_reduce" for i in program.function.instructions) == 2


def test_what_is_no_module_of_all_ranks_is_refused(torch: Any) -> None:
    x = torch.zeros(SEQ, BATCH, HIDDEN)
    advice = r"_c10d_functional::all_reduce \(1x.*rank_program, and give the number of ranks"
    with pytest.raises(PerfModelError, match=advice):
        torch_program(stage(torch, RANKS), (x,))
    with pytest.raises(
        PerfModelError, match="needs at least 2 ranks, got ranks=1; use torch_program"
    ):
        rank_program(stage(torch, 1), (x,), ranks=1)
    module = stage(torch, RANKS, sequence_parallel=True)
    with pytest.raises(PerfModelError, match="a collective of 2 of the 4 ranks"):
        rank_program(module, (x[: SEQ // RANKS],), ranks=4)
    with pytest.raises(PerfModelError, match="no_such"):
        rank_program(stage(torch, RANKS), (x,), ranks=RANKS, sharded={"no_such": 0})
    with pytest.raises(LayoutError, match=r"proj_bias of shape \(16,\) has no axis 1"):
        rank_program(stage(torch, RANKS), (x,), ranks=RANKS, sharded={"proj_bias": 1})
    alone = torch_program(stage(torch, RANKS), (x,), ranks=RANKS)
    with pytest.raises(LayoutError, match="is not one of all 3 ranks"):
        all_ranks(alone, 3, {})
