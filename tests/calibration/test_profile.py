"""Profiles: a step that is exactly as predicted, one whose parts are slower, and what cannot be
read."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

import perfmodel as pm
from perfmodel.calibration import amount, explain_profile, fit_profile
from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.ingest import Profile
from perfmodel.ingest.profiles import Activity, ActivityKind, Detail, family_of, profile_of
from perfmodel.ops import Collective, Gemm
from perfmodel.prediction import event_shares, priced_events, step_problem_of
from perfmodel.spec import Framework, Layout, Problem, Transformer

MODEL = Transformer(
    name="small",
    layers=2,
    hidden=1024,
    heads=8,
    kv_heads=8,
    head_dim=128,
    ffn_hidden=4096,
    vocab=8192,
    seq_len=512,
    tied_embeddings=False,
    dropout=False,
)
SERIAL = Framework(
    name="serial", execution="compiled", overlap_grad_reduce=False, overlap_param_gather=False
)


def problem(framework: Framework = SERIAL) -> Problem:
    return pm.problem(MODEL, "dgx-a100", global_batch=8, framework=framework)


def profile(
    layout: str,
    factors: dict[str, float],
    *,
    steps: int = 3,
    gap_s: float = 2e-6,
    shapes: bool = True,
    devices: int = 0,
) -> Profile:
    """Every predicted event of a step, one after another, each family longer by its factor; on
    `devices` of all."""
    laid_out = Layout.parse(layout)
    fixed = step_problem_of(problem()).adjusted(None)
    shares = event_shares(fixed, laid_out)
    seconds = priced_events(fixed, shares.ops).time_s
    found = []
    for device in range(devices or laid_out.devices):
        at_s = 0.0
        for step in range(steps):
            for number, (op, count, time_s) in enumerate(
                zip(shares.ops, shares.executions, seconds, strict=True)
            ):
                factor = factors.get(op.family, 1.0)
                for _ in range(round(count / laid_out.devices)):
                    comm = isinstance(op, Collective)
                    kind = ActivityKind.COMMUNICATION if comm else ActivityKind.COMPUTE
                    name = (
                        f"nccl {op.collective}"
                        if comm
                        else {"gemm": "aten::mm", "memory": "aten::add"}.get(
                            op.family,
                            "aten::_fused_adam_"
                            if op.family == "optimizer"
                            else f"aten::{op.family}",
                        )
                    )
                    activity = Activity(
                        device, 0, at_s, at_s + time_s * factor, name, kind, step=step
                    )
                    found.append(
                        (activity, Detail((device, len(found)), name, row(op) if shapes else None))
                    )
                    at_s += time_s * factor + gap_s
                del number
    return profile_of(found, Path("made"))


def row(op: object) -> dict:
    values = {name: getattr(op, name) for name in op.__dataclass_fields__}  # pyright: ignore
    if isinstance(op, Collective):
        return values
    return values | {"op_family": op.family, "pass": op.pass_}  # pyright: ignore


FACTORS = {"gemm": 1.4, "memory": 0.8, "all_reduce": 2.0}


@pytest.mark.parametrize("shapes", [True, False])
def test_factors_that_were_put_in_come_out(shapes: bool) -> None:
    report = explain_profile(problem(), "tp=2,dp=1", profile("tp=2,dp=1", FACTORS, shapes=shapes))
    found = {c.name: c for c in report.corrections}
    for family in ("gemm", "memory"):
        assert found[family].value == pytest.approx(log(FACTORS[family]), abs=0.02)
        assert found[family].sd < 0.1
    for name in ("intra_node.alpha", "intra_node.all_reduce.beta"):
        assert found[name].value == pytest.approx(log(2), abs=0.1)
    assert found["kernel_gap_s"].value == pytest.approx(
        log(2e-6 / SERIAL.host.kernel_gap_s), abs=0.15
    )
    assert report.matched_share > 0.98 if shapes else report.matched_share < 0.2


def test_what_holds_up_a_few_calls_is_not_the_kernels() -> None:
    """Products of which every twentieth call waits for other work of the machine."""
    quiet = profile("tp=2", FACTORS)
    calls = [
        replace(call, time_s=call.time_s + 0.004 * (n % 20 == 0 and call.family == "gemm"))
        for n, call in enumerate(quiet.calls)
    ]
    report = explain_profile(problem(), "tp=2", replace(quiet, calls=tuple(calls)))
    found = {c.name: c.value for c in report.corrections}
    assert found["gemm"] == pytest.approx(log(FACTORS["gemm"]), abs=0.02)


def test_collectives_that_nothing_hides_show() -> None:
    """The prediction hides all-reduces of the backward behind weight gradients; this step waits for
    every one."""
    found = {
        c.name: c.value
        for c in explain_profile(problem(), "tp=2", profile("tp=2", FACTORS)).corrections
    }
    assert found["tp_overlap_loss"] == pytest.approx(1.0)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(
        problem(), model=replace(MODEL, layers=3, hidden=1280, heads=10, kv_heads=10, vocab=6400)
    )
    with pytest.raises(PerfModelError, match="give the model, job and layout that were recorded"):
        fit_profile(other, "tp=1", profile("tp=1", {}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_layouts_after_one_profile(tmp_path: Path) -> None:
    """Other layouts come out as if the cost models had had the factors all along."""
    fitted = fit_profile(problem(), "tp=2", profile("tp=2", FACTORS), out=tmp_path)
    assert fitted.report.predicted_step_s < fitted.report.measured_step_s
    for layout in ("tp=1", "tp=4"):
        laid_out, fixed = Layout.parse(layout), step_problem_of(problem()).adjusted(None)
        shares = event_shares(fixed, laid_out)
        factor = np.array([FACTORS.get(op.family, 1.0) for op in shares.ops])
        per_device = shares.executions / laid_out.devices
        events_s = float((per_device * priced_events(fixed, shares.ops).time_s * factor).sum())
        truth_s = events_s + per_device.sum() * 2e-6
        before_s = pm.predict(problem(), layout=layout).step_time_s
        after_s = pm.predict(problem(), layout=layout, calibration=tmp_path).step_time_s
        after, before = abs(after_s / truth_s - 1), abs(before_s / truth_s - 1)
        assert after < 0.03
        # Layouts that the plain models meet by chance have nothing to gain.
        assert after < max(0.8 * before, 0.01)


def test_a_rank_of_a_pipeline_goes_by_its_kernels_of_known_shape() -> None:
    one = explain_profile(problem(), "pp=2,dp=1", profile("pp=2,dp=1", FACTORS, devices=1))
    gemm = next(c for c in one.corrections if c.name == "gemm")
    assert one.devices == 1
    assert gemm.value == pytest.approx(log(1.4), abs=0.01)


def test_largest_differences_come_first_and_add_up() -> None:
    report = explain_profile(problem(), "tp=1", profile("tp=1", {"gemm": 1.5}), most=1000)
    effects = [abs(d.effect_s) for d in report.differences]
    assert effects == sorted(effects, reverse=True)
    assert report.differences[0].family == "gemm"
    assert len(explain_profile(problem(), "tp=1", profile("tp=1", {})).differences) <= 20
    gap_s = report.measured_step_s - report.predicted_step_s
    assert sum(d.effect_s for d in report.differences) == pytest.approx(gap_s, rel=0.05)


def test_waits_are_not_the_collectives_own_time() -> None:
    """The rank that comes late finds the others there: what they take longer is skew, and not the
    link."""
    made = profile("tp=2", {})
    late_s = 1e-3
    calls = tuple(
        replace(c, end_s=c.end_s + late_s, time_s=c.time_s + late_s)
        if c.device == 0 and c.kind == ActivityKind.COMMUNICATION
        else c
        for c in made.calls
    )
    found = {
        c.name: c.value
        for c in explain_profile(problem(), "tp=2", replace(made, calls=calls)).corrections
    }
    assert found["intra_node.alpha"] == pytest.approx(0, abs=0.05)
    assert found["collective_skew_s"] == pytest.approx(
        late_s / 2 / np.sqrt(2 * np.log(2)), rel=0.05
    )


def test_a_step_that_nobody_recorded_shortens_the_hosts_part() -> None:
    made = profile("tp=1", {}, gap_s=50e-6)
    recorded_s = float(np.median(made.step_s()))
    slow, fast = (
        {c.name: c for c in fit_profile(problem(), "tp=1", made, step_s=s).report.corrections}
        for s in (None, 0.97 * recorded_s)
    )
    assert fast["kernel_gap_s"].seconds == pytest.approx(
        slow["kernel_gap_s"].seconds - 0.03 * recorded_s, rel=1e-6
    )
    assert fast["gemm"].value == slow["gemm"].value


def test_more_devices_than_the_layout_has_are_refused() -> None:
    with pytest.raises(
        PerfModelError, match=r"2 devices, layout .* has 1; give the layout that ran"
    ):
        explain_profile(problem(), "tp=1", profile("tp=2", {}))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten::addmm", "gemm"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x32", "gemm"),
        ("fc-dtype_Float", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x128", "gemm"),
        ("fbgemm::permute_sparse_features", ""),
        ("aten::bmm", "bmm"),
        ("flash_fwd_kernel<...>", "attention"),
        ("aten::cudnn_convolution", "conv"),
        ("void implicit_convolve_sgemm", "conv"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::uniform_", "memory"),
        ("at::native::(anonymous namespace)::{lambda()#1}", ""),
        ("aten::embedding", "embedding"),
        ("loop_fusion.3", "memory"),
        ("dot.7", "gemm"),
        ("mystery", ""),
    ],
)
def test_families_by_name(name: str, family: str) -> None:
    assert family_of(name) == family


def test_products_of_a_row_are_events() -> None:
    op = Gemm(op="linear", dtype="bf16", m=3, n=4, k=5, pass_="dgrad")
    made = profile_of(
        [(Activity(0, 0, 0.0, 1.0, "x", ActivityKind.COMPUTE), Detail(0, "", row(op)))],
        Path("made"),
    )
    assert made.calls[0].op == op


BROKEN: Sequence[str] = (
    "",
    "{}",
    '{"traceEvents": []}',
    '{"schemaVersion": 1, "traceEvents": []}',
    "\x00\x01",
)


@pytest.mark.parametrize("text", BROKEN)
def test_broken_files_are_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(text)
    flags = [
        "--model",
        "gpt2",
        "--cluster",
        "dgx-a100",
        "--global-batch",
        "8",
        "--layout",
        "tp=1,dp=1",
    ]
    assert main(["explain", "--profile", str(path), *flags]) == 2
    assert main(["fit", "--profile", str(path), *flags, "--out", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert sum("rank0.json" in line for line in lines) >= 2
    assert not (tmp_path / "out").exists()


def test_a_step_too_short_for_its_arithmetic_names_what_to_check(tmp_path: Path) -> None:
    """A profile has no column of a table, so the remedy is what was recorded."""
    with pytest.raises(PerfModelError, match="give the model, job and layout that were recorded"):
        fit_profile(problem(), "tp=1", profile("tp=1", {}), out=tmp_path, step_s=1e-9)


@pytest.mark.parametrize(
    ("name", "value", "sd", "text"),
    [
        ("collective_skew_s", 3.88e-4, 7.8e-5, "+388 us ± 78 us"),
        ("step_overhead_s", -0.0021, 0.0004, "-2.1 ms ± 400 us"),
        ("tp_overlap_loss", 0.1234, 0.02, "+12% ± 2%"),
        ("straggling", 0.0, 1e-6, "0% ± 0%"),
        ("gemm", 0.1, 0.02, "+10.5% ± 2.0%"),
    ],
)
def test_corrections_have_a_unit(name: str, value: float, sd: float, text: str) -> None:
    corrections = explain_profile(problem(), "tp=1", profile("tp=1", {})).corrections
    assert amount(replace(corrections[0], name=name, value=value, sd=sd)) == text


def test_the_commands_that_need_to_know_what_ran_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--profile", "rank0.json", "--out", str(tmp_path / "out")]) == 2
    assert (
        "--model, --cluster, --global-batch, --layout (or --from FILE, or JOB.toml)"
        in capsys.readouterr().err
    )
    assert main(["fit", "--out", str(tmp_path / "out")]) == 2
    assert "--profile FILE" in capsys.readouterr().err


def test_json_of_the_report_is_plain() -> None:
    report = explain_profile(problem(), "tp=1", profile("tp=1", {})).to_dict()
    assert json.loads(json.dumps(report)) == report
