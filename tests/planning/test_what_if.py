"""Scenarios: direction and size of every effect, sensitivities against finite steps, bad input."""

import numpy as np
import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.what_if import (
    NAMES,
    Scenario,
    in_scenario,
    parse_setting,
    parse_sweep,
    step_s,
    sweep,
)
from perfmodel.prediction import EAGER, explain, layout_batches, step_problem
from perfmodel.spec import Cluster, Job, Layout

LAYOUT = Layout.parse("tp=2,pp=2,dp=16,zero=1")


@pytest.fixture(scope="module")
def problem():
    model = catalog.model("gpt3-1.3b")
    return step_problem(
        model, catalog.cluster("dgx-a100"), Job(global_batch=512, seq_len=model.seq_len)
    )


def change(problem, *settings: str, layout: Layout = LAYOUT) -> float:
    return in_scenario(problem, layout, Scenario.parse(settings)).change


def test_nothing_changed_changes_nothing(problem) -> None:
    result = in_scenario(problem, LAYOUT, Scenario())
    assert result.change == 0
    predicted = pm.predict("gpt3-1.3b", "dgx-a100", LAYOUT, global_batch=512)
    assert result.before_s == pytest.approx(predicted.step_time_s, rel=1e-5)


@pytest.mark.parametrize(
    "setting",
    [
        "compute_rate=2x",
        "memory_bandwidth=2x",
        "intra_node_bandwidth=2x",
        "inter_node_bandwidth=4x",
        "intra_node_latency=0.5x",
        "host_op_s=0",
        "kernel_gap_s=0",
    ],
)
def test_better_is_never_slower(problem, setting: str) -> None:
    assert -0.6 < change(problem, setting) <= 0


@pytest.mark.parametrize(
    "setting", ["all_gather_delay_s=0.001", "reduce_scatter_delay_s=0.2", "slow_factor=1.3x"]
)
def test_worse_is_slower(problem, setting: str) -> None:
    assert change(problem, setting) > 0


def machine(scenario: Scenario, cluster: Cluster) -> dict[str, float | None]:
    """What settings name, of a cluster in a scenario."""
    device, changed, framework = (
        scenario.device(cluster.device),
        scenario.cluster(cluster),
        scenario.framework(EAGER),
    )
    inside, outside = changed.levels[0], changed.levels[-1]
    values = {
        "compute_rate": device.flops_per_s("bf16"),
        "memory_bandwidth": device.memory_bandwidth_bytes_per_s,
        "memory_bytes": device.memory_bytes,
        "power_limit": device.power_w,
        "host_bandwidth": device.host_bandwidth_bytes_per_s,
        "intra_node_bandwidth": inside.bandwidth_bytes_per_s,
        "intra_node_latency": inside.latency_s,
        "inter_node_bandwidth": outside.bandwidth_bytes_per_s,
        "inter_node_latency": outside.latency_s,
        "host_op_s": framework.host.host_op_s,
        "kernel_gap_s": framework.host.kernel_gap_s,
    }
    assert changed.device.power_w == device.power_w
    return values


@pytest.mark.parametrize("name", machine(Scenario(), catalog.cluster("dgx-a100")))
def test_a_setting_changes_what_it_names_and_nothing_else(name: str) -> None:
    cluster = catalog.cluster("dgx-a100")
    before = machine(Scenario(), cluster)
    value = before[name]
    assert value
    assert machine(Scenario.parse([f"{name}=2x"]), cluster) == before | {name: 2 * value}
    assert machine(Scenario.parse([f"{name}=+50%"]), cluster) == before | {name: 1.5 * value}
    if name != "compute_rate":
        assert machine(Scenario.parse([f"{name}={3 * value!r}"]), cluster) == before | {
            name: 3 * value
        }


def test_nodes_of_one_device_have_links_between_nodes_alone() -> None:
    cluster = catalog.cluster("timeprest")
    assert cluster.devices_per_node == 1
    doubled = Scenario.parse(["inter_node_bandwidth=2x", "inter_node_latency=3x"]).cluster(cluster)
    for level, before in zip(doubled.levels, cluster.levels, strict=True):
        assert level.bandwidth_bytes_per_s == 2 * before.bandwidth_bytes_per_s
        assert level.latency_s == 3 * before.latency_s
    inside = Scenario.parse(["intra_node_bandwidth=2x", "intra_node_latency=3x"])
    assert inside.cluster(cluster).levels == cluster.levels


def test_a_delay_is_added_to_every_collective_of_its_kind(problem) -> None:
    """Where nothing hides it: to the reduction of every segment's gradients, of which a single
    replica has none."""
    others = Scenario.parse(
        ["all_gather_delay_s=0.5", "reduce_scatter_delay_s=0.5", "all_to_all_delay_s=0.5"]
    )
    for dp in (1, 8):
        layout = Layout(
            dp=dp,
            micro_batch=512 // dp,
            zero=0,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        (batch,) = layout_batches(problem, [layout])
        reductions = batch.spec.segments * (dp > 1)
        before_s, delayed_s, with_others_s = (
            step_s(problem, layout, scenario)
            for scenario in (Scenario(), Scenario.parse(["all_reduce_delay_s=0.5"]), others)
        )
        assert delayed_s - before_s == pytest.approx(0.5 * reductions)
        assert with_others_s == before_s


def test_slow_rank_bounds(problem) -> None:
    """A rank that takes 1.3 times as long slows the step by at most that, and by most of it in a
    full pipeline."""
    for rank in (0, 1):
        assert 0.1 < change(problem, f"slow_rank={rank}", "slow_factor=1.3x") <= 0.3 + 1e-6
    with pytest.raises(LayoutError, match="ranks 0 to 1, got 2"):
        change(problem, "slow_rank=2", "slow_factor=1.3x")
    with pytest.raises(LayoutError, match="without replicas"):
        change(problem, "slow_factor=1.3x", layout=LAYOUT.replace(schedule="chimera"))


def test_sensitivities_predict_small_changes(problem) -> None:
    base = in_scenario(problem, LAYOUT, Scenario())
    for name in ("compute_rate", "memory_bandwidth"):
        slope = base.sensitivity[name]
        assert -1 <= slope < 0
        assert np.log1p(change(problem, f"{name}=+3%")) == pytest.approx(
            slope * np.log(1.03), rel=0.1
        )
    assert abs(sum(v for k, v in base.sensitivity.items() if "latency" not in k)) <= 1
    assert base.to_frame().parameter[0] == "compute_rate"


def test_a_hidden_delay_is_not_felt_and_a_long_one_in_full(problem) -> None:
    """The gradient reduction runs beside backward: the curve is flat up to a knee, then linear."""
    layout = Layout.parse("tp=1,pp=1,dp=64,micro_batch=2")
    hidden = sweep(
        problem, layout, Scenario(), parse_sweep("all_reduce_delay_s=0:0.3:4")
    ).hidden_up_to
    assert hidden is not None
    none_s, below_s, above_s = (
        step_s(problem, layout, Scenario.parse([f"all_reduce_delay_s={share * hidden!r}"]))
        for share in (0, 0.999, 1.01)
    )
    assert none_s <= below_s <= 1.001 * none_s < above_s
    curve = sweep(
        problem, layout, Scenario(), parse_sweep(f"all_reduce_delay_s=0:{4 * hidden + 0.2}:9")
    )
    steps = np.diff(curve.step_s)
    assert (steps >= -1e-9).all()
    np.testing.assert_allclose(steps[-3:], steps[-1], rtol=1e-3)
    assert list(curve.to_frame()) == ["all_reduce_delay_s", "step_s"]
    # a dense model exchanges no tokens: however long that took
    never = sweep(problem, layout, Scenario(), parse_sweep("all_to_all_delay_s=0:1000:2"))
    assert never.step_s[1] == never.step_s[0] == never.hidden_up_to


def test_what_a_power_limit_holds_back_is_said(problem) -> None:
    layout = Layout.parse("tp=2,pp=2,dp=2")
    held = in_scenario(problem, layout, Scenario.parse(["compute_rate=4x"]))
    freed = in_scenario(problem, layout, Scenario.parse(["compute_rate=4x", "power_limit=100x"]))
    (note,) = held.notes
    assert "power limit of 400 W" in note
    assert "power_limit=2x" in note
    assert freed.after_s < 0.98 * held.after_s
    assert freed.notes == ()
    unknown = step_problem(
        catalog.model("gpt3-125m"), catalog.cluster("mi355x"), Job(global_batch=8, seq_len=1024)
    )
    with pytest.raises(PerfModelError, match="not known; leave power_limit out"):
        in_scenario(unknown, Layout(), Scenario.parse(["power_limit=2x"]))


def test_memory_decides_what_fits(problem) -> None:
    result = in_scenario(problem, LAYOUT, Scenario.parse(["memory_bytes=1e9"]))
    assert (result.fits_before, result.fits_after) == (True, False)
    assert result.fits_probability_before == pytest.approx(
        explain(problem, LAYOUT).fits_probability
    )
    assert result.fits_probability_after < 0.1


@pytest.mark.parametrize(
    ("text", "value", "how"),
    [
        ("compute_rate=2x", 2.0, "times"),
        ("memory_bandwidth=+10%", 1.1, "times"),
        ("host_op_s=0", 0.0, "to"),
    ],
)
def test_settings(text: str, value: float, how: str) -> None:
    setting = parse_setting(text)
    assert (setting.value, setting.how) == (pytest.approx(value), how)
    assert setting.name in NAMES


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["compute_rate"], "has no value"),
        (["compute_rate=fast"], "must be like 2x"),
        (["compute_rate=-1x"], "positive and finite"),
        (["inter_node_bandwidth=0"], "positive and finite"),
        (["host_op_s=nan"], "positive and finite"),
        (["host_op_s=1e-5", "host_op_s=2e-5"], "set twice"),
    ],
)
def test_bad_settings_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(PerfModelError, match=message):
        Scenario.parse(texts)


def test_unknown_parameters_are_suggested(problem) -> None:
    with pytest.raises(UnknownNameError, match="inter_node_bandwidth"):
        Scenario.parse(["inter_node_bandwith=2x"])
    with pytest.raises(PerfModelError, match="is set as a multiple"):
        change(problem, "compute_rate=3")
    for text in ("host_op_s=1:2", "host_op_s=0:1:x", "host_op_s=0:2x:4", "host_op_s"):
        with pytest.raises(PerfModelError, match="sweep"):
            parse_sweep(text)


def test_command(capsys, tmp_path) -> None:
    common = [
        "whatif",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--layout",
        "dp=8",
        "--global-batch",
        "64",
    ]
    picture = tmp_path / "curve.png"
    assert (
        main(
            [
                *common,
                "--set",
                "inter_node_bandwidth=2x",
                "--sweep",
                "compute_rate=1x:2x:3",
                "--png",
                str(picture),
            ]
        )
        == 0
    )
    assert "10 % more of" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*common, "--set", "nothing=1"]) == 2
    assert "unknown what-if parameter" in capsys.readouterr().err
    assert main([*common, "--png", "x.png"]) == 2
    assert "--sweep" in capsys.readouterr().err


def test_by_name() -> None:
    result = pm.whatif("gpt3-1.3b", "dgx-a100", "dp=8", ["compute_rate=2x"], global_batch=64)
    assert -0.5 < result.change < -0.05  # products at their power limit gain nothing
    assert result.to_dict()["settings"] == ["compute_rate=2x"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("inter_node_bandwidth=200Gbit/s", "inter_node_bandwidth=25GB/s"),
        ("inter_node_latency=5us", "inter_node_latency=5us"),
        ("memory_bytes=8.589934592e10", "memory_bytes=80GiB"),
        ("power_limit=350", "power_limit=350W"),
        ("slow_factor=1.25x", "slow_factor=1.25x"),
        ("slow_rank=3", "slow_rank=3"),
    ],
)
def test_settings_are_shown_in_units_that_are_read_back(given: str, shown: str) -> None:
    assert str(parse_setting(given)) == shown
    assert parse_setting(shown) == parse_setting(given)
