"""Kernels that reduce rows: a softmax of scores and a norm, of a library, generated, or ended at
every reduction."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.ops import KernelOp
from perfmodel.spec import Job, RowKernels, Transformer
from perfmodel.workload import Shard, blocks

NAMES = ("bert-large", "gpt2-1.5b", "t5-11b", "vit-l-16", "llama2-7b")
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}


def layer_bytes(name: str, row_kernels: RowKernels, **changes: object) -> tuple[float, float]:
    """Bytes that the memory-bound kernels of a layer move, forward and backward."""
    net = catalog.model(name)
    assert isinstance(net, Transformer)
    job = Job(global_batch=8, seq_len=net.seq_len, flash_attention=False, row_kernels=row_kernels)
    job = replace(job, **changes)  # pyright: ignore[reportArgumentType]
    layer = next(block for block, _ in blocks(net, job, Shard(micro_batch=3)) if block.is_layer)

    def moved(kernels: tuple[tuple[KernelOp, int], ...]) -> float:
        return sum(count * op.bytes for op, count in kernels if op.family == "memory")

    return moved(layer.forward), moved(layer.backward_input)


@given(st.sampled_from(NAMES), st.sampled_from(sorted(BYTES)))
def test_a_generated_kernel_moves_least_and_reductions_read_more(name: str, dtype: str) -> None:
    """Whatever model and type: three sequences make heads that Megatron's kernel would refuse, and
    so do 32 bits."""
    eager = layer_bytes(name, "library", dtype=dtype, eager_kernels=("softmax",))
    library = layer_bytes(name, "library", dtype=dtype)
    generated = layer_bytes(name, "generated", dtype=dtype)
    by_reduction = layer_bytes(name, "by_reduction", dtype=dtype)
    for least, more in ((generated, library), (library, eager), (generated, by_reduction)):
        # Widths of kernels that only read are rounded to whole elements.
        assert least[0] <= more[0] * (1 + 1e-3)
        assert least[1] <= more[1] * (1 + 1e-3)
    assert generated < by_reduction


@pytest.mark.parametrize("dtype", sorted(BYTES))
def test_bytes_of_scores_and_norms_of_an_encoder(dtype: str) -> None:
    """By hand: with dropout, a generated softmax writes the softmax, its mask and its result.
    Reductions read scores twice more forward; in backward the softmax, its gradient and the mask
    once more. Norms read their input twice more, and in backward input and gradient twice more."""
    net = catalog.model("bert-large")
    assert isinstance(net, Transformer)
    element = BYTES[dtype]
    scores = 3 * net.heads * net.seq_len**2
    hidden = 3 * net.seq_len * net.hidden
    generated = layer_bytes("bert-large", "generated", dtype=dtype)
    by_reduction = layer_bytes("bert-large", "by_reduction", dtype=dtype)
    norms = 2
    assert by_reduction[0] - generated[0] == pytest.approx(
        2 * element * (scores + norms * hidden), rel=2e-3
    )
    further_bytes = (2 * element + 1) * scores + 4 * element * norms * hidden
    assert by_reduction[1] - generated[1] == pytest.approx(further_bytes, rel=2e-3)

    eager = layer_bytes("bert-large", "library", dtype=dtype, eager_kernels=("softmax",))
    # Scale and mask read and write scores, as the softmax does, whose result dropout reads again.
    # The bytes of its own kernel leave out the mask.
    assert eager[0] - generated[0] == pytest.approx((5 * element - 1) * scores, rel=2e-3)


@given(st.sampled_from(NAMES))
def test_fused_attention_leaves_norms_alone_to_reduce(name: str) -> None:
    """There are no scores, and a generated norm moves what a library's does."""
    fused = {"flash_attention": True, "dtype": "bf16"}
    assert layer_bytes(name, "generated", **fused) == layer_bytes(name, "library", **fused)
    assert layer_bytes(name, "by_reduction", **fused) > layer_bytes(name, "library", **fused)


def test_memory_is_that_of_a_library() -> None:
    """All keep the softmax, the mask and the result of dropout, and the input of norms."""
    net = catalog.model("bert-large")
    job = Job(global_batch=8, seq_len=512, dtype="fp16", flash_attention=False)
    kept = {
        kind: blocks(net, replace(job, row_kernels=kind), Shard(micro_batch=4))[1][
            0
        ].activation_bytes
        for kind in ("library", "generated", "by_reduction")
    }
    assert kept["library"] == kept["generated"] == kept["by_reduction"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        LayoutError, match="row_kernels must be one of library, generated, by_reduction; got 'xla'"
    ):
        Job(global_batch=8, seq_len=512, row_kernels="xla")  # pyright: ignore[reportArgumentType]


def test_compiled_scores_take_bytes_alone_whatever_the_type() -> None:
    """In 32 bits a softmax that a compiler makes moves up to twice the bytes of 16 bits, in the
    same kernels."""
    net = catalog.model("bert-large")
    job = Job(global_batch=8, seq_len=512, flash_attention=False, row_kernels="generated")

    def names(dtype: str) -> list[str]:
        layer = blocks(net, replace(job, dtype=dtype), Shard(micro_batch=3))[1][0]
        return [op.op for op, _ in layer.forward]

    assert names("fp16") == names("fp32")
    assert not {"softmax", "scale_mask_softmax", "dropout"} & set(names("fp32"))
    assert layer_bytes("bert-large", "generated", dtype="fp32") > layer_bytes(
        "bert-large", "generated", dtype="fp16"
    )
