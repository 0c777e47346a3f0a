"""Products that stay wider than a job's others: which do, and that nothing else changes."""

from collections import Counter
from dataclasses import replace

import pytest

from perfmodel import catalog, predict
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks, is_cast

NET = catalog.model("nemotron-3-super-mtp")
JOB = Job(global_batch=64, seq_len=8192, dtype="fp4", fp8_recipe="nvfp4")
WIDE = ("attention", "latent", "further_tokens", "mamba_output")


def dtypes(name: str, job: Job) -> list[str]:
    """Of the products with weights of the first block of a name, in forward order, but for the
    router's."""
    block = next(block for block, _ in blocks(NET, job, Shard(ep=64)) if block.name == name)
    products = [op for op, _ in block.forward if op.is_matmul and op.family != "attention"]
    return [op.dtype for op in products if getattr(op, "n", 0) != 512]


@pytest.mark.parametrize(
    ("module", "layer", "narrow", "wide"),
    [
        ("attention", "attention_layer", ["fp4", "fp4"], ["bf16", "bf16"]),
        # there, two products of routed experts, and back; two of the shared expert
        ("latent", "moe_layer", ["fp4"] * 6, ["bf16", "fp4", "fp4", "bf16", "fp4", "fp4"]),
        ("mamba_output", "mamba_layer", ["fp4", "fp4"], ["fp4", "fp8"]),
    ],
)
def test_a_wide_module(module: str, layer: str, narrow: list[str], wide: list[str]) -> None:
    assert dtypes(layer, JOB) == narrow
    assert dtypes(layer, replace(JOB, wide_modules=(module,))) == wide
    others = tuple(one for one in WIDE if one != module)
    assert dtypes(layer, replace(JOB, wide_modules=others)) == narrow


def test_modules_for_further_tokens() -> None:
    assert "fp4" in dtypes("further_token_head", JOB)
    assert set(dtypes("further_token_head", replace(JOB, wide_modules=("further_tokens",)))) == {
        "bf16"
    }


def test_the_last_layers_quantise_nothing() -> None:
    found = blocks(NET, replace(JOB, wide_last_layers=14), Shard(ep=64))
    layers = [(block, count) for block, count in found if block.name.endswith("_layer")]
    wide = [count for block, count in layers if not any(is_cast(op) for op, _ in block.forward)]
    assert sum(count for _, count in layers) == 88
    assert sum(wide) == 14
    plain = Counter(
        block.name for block, count in blocks(NET, JOB, Shard(ep=64)) for _ in range(count)
    )
    assert Counter(block.name for block, count in found for _ in range(count)) == plain


def test_wide_products_have_nothing_to_say_where_all_are() -> None:
    job = Job(global_batch=64, seq_len=8192)
    assert blocks(
        NET, replace(job, wide_modules=WIDE, wide_last_layers=14), Shard(ep=64)
    ) == blocks(NET, job, Shard(ep=64))


def test_more_wide_products_take_longer() -> None:
    jobs = [
        replace(JOB, wide_modules=modules, wide_last_layers=layers)
        for modules, layers in (((), 0), (WIDE, 0), (WIDE, 14), (WIDE, 88))
    ]
    times_s = [
        predict(NET, "gb300-nvl72", "dp=64,ep=64,zero=1", job=job).step_time_s for job in jobs
    ]
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == len(jobs)


def test_what_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'attention'"):
        replace(JOB, wide_modules=("atention",))
    with pytest.raises(PerfModelError, match="wide_last_layers"):
        replace(JOB, wide_last_layers=-1)
