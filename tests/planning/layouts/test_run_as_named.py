"""What a search may recommend for a framework, its launch file states, and runs as named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch import export_launch
from perfmodel.spec import Layout, Problem

WITH_ALL_STAGES = (
    "deepspeed",
    "maxtext",
    "megatron-bridge",
    "megatron-core",
    "megatron-deepspeed",
    "nanotron",
    "nemo",
    "torchtitan",
)
"""Frameworks whose launch files state every stage of ZeRO that they run."""
SHARDED = ("deepspeed", "deepspeed-gaudi", "gpt-neox", "megatron-deepspeed", "xtuner")
"""Frameworks that train in bf16 by DeepSpeed's optimizer, which shards its states."""


def problem(framework: str, dtype: str = "bf16", **job: object) -> Problem:
    return catalog.problem(
        "mixtral-8x7b",
        "dgx-h100",
        global_batch=64,
        framework=framework,
        dtype=dtype,
        **job,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("framework", WITH_ALL_STAGES)
@given(
    degrees=st.fixed_dictionaries(
        {name: st.sampled_from((1, 2)) for name in ("tp", "pp", "cp", "ep")}
        # With one replica, MaxText's mesh has no axis left that says the stage.
        | {"dp": st.sampled_from((2, 4))}
    ),
    zero=st.integers(0, 3),
    dtype=st.sampled_from(("bf16", "fp16", "fp8")),
)
def test_a_stage_that_a_framework_runs_is_stated_by_its_file(
    framework: str, degrees: dict[str, int], zero: int, dtype: str
) -> None:
    asked = problem(framework, dtype)
    # The framework's defaults for everything but the degrees.
    text = ",".join(f"{name}={value}" for name, value in degrees.items())
    try:
        layout, _ = asked.framework.layout(f"{text},zero={zero}", asked.model)
    except PerfModelError:
        return
    if asked.framework.refused(layout):
        return
    try:
        export_launch(layout, framework, model=asked.model, job=asked.job)
    except LaunchFileError as error:
        # Other settings may have no key, but never the stage of ZeRO.
        reasons = str(error).partition(f"{layout.label}: ")[2]
        assert "zero=" not in reasons.partition("; use ")[0]


@pytest.mark.parametrize("framework", SHARDED)
@pytest.mark.parametrize("degrees", ["dp=8", "pp=2,dp=4"])
def test_bf16_of_deepspeed_has_no_stage_0(framework: str, degrees: str) -> None:
    asked = problem(framework)
    default, _ = asked.framework.layout(degrees, asked.model)
    assert default.zero >= 1
    assert asked.framework.layout(asked.notation(default), asked.model)[0] == default
    unsharded = default.replace(zero=0)
    assert "zero" in asked.framework.refused(unsharded)
    assert "use zero=1" in asked.framework.cannot_run(unsharded)[0]
    # The notation of what is refused still reads back as it is.
    assert asked.framework.layout(asked.notation(unsharded), asked.model)[0] == unsharded


@pytest.mark.parametrize("framework", SHARDED)
def test_nothing_is_sharded_where_there_is_nothing_to_shard(framework: str) -> None:
    # One replica, or no optimizer.
    assert "zero" not in problem(framework).framework.refused(Layout(pp=8, zero=0))
    inference = problem(framework, mode="inference").framework
    assert "zero" not in inference.refused(Layout(dp=8, zero=0))
    if framework not in ("deepspeed-gaudi",):
        assert "zero" not in problem(framework, "fp16").framework.refused(Layout(dp=8, zero=0))


@pytest.mark.parametrize(("framework", "alone"), [("torchtitan", "tp"), ("maxtext", "ep")])
def test_plain_data_parallelism_is_refused_beside_some_degrees(framework: str, alone: str) -> None:
    runs = problem(framework).framework
    assert "zero" not in runs.refused(Layout(dp=8, zero=0))
    assert "zero" in runs.refused(Layout(dp=8, zero=0).replace(**{alone: 2}))
    assert "zero" not in runs.refused(Layout(dp=8, zero=3).replace(**{alone: 2}))
