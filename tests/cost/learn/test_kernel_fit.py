"""Fitting from small tables: accuracy, determinism, resuming, bad tables."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.cost.learn import PriceQuery, Query, load_regressor, save_regressor
from perfmodel.cost.learn.rows import KindCode
from perfmodel.cost.learn.training import (
    Recipe,
    Stages,
    Training,
    fit,
    fit_base,
    fit_regressor,
    gather,
    member,
    split,
    train,
    train_members,
)
from perfmodel.cost.learn.training._train import _step
from perfmodel.errors import CalibrationError, TableError
from perfmodel.files import UNSEALED, sealed
from perfmodel.ops import Gemm

TINY = Recipe(
    name="gemm",
    family="gemm",
    hidden=(8, 8, 8),
    stack_size=2,
    table_size=1,
    steps=40,
    batch=32,
    refit_steps=20,
    left_out_steps=20,
)


def gemm_table(rows: int = 80, seed: int = 0) -> pd.DataFrame:
    """Products on two devices at 70 % of peak plus 5 us, 1 % noise."""
    rng = np.random.default_rng(seed)
    m, n, k = (2 ** rng.integers(6, 13, rows) for _ in range(3))
    name = np.where(rng.random(rows) < 0.5, "A100-SXM4-80GB", "H100-SXM-80GB")
    peak = np.where(name == "A100-SXM4-80GB", 312e12, 989e12)
    time_us = 5 + 2.0 * m * n * k / (0.7 * peak) * 1e6
    return pd.DataFrame(
        {
            "source": "lab",
            "device": name,
            "op_family": "gemm",
            "op": "linear",
            "dtype": "bf16",
            "m": m,
            "n": n,
            "k": k,
            "pass": "fwd",
            "software": "torch",
            "time_us": time_us * np.exp(0.01 * rng.standard_normal(rows)),
        }
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibration")
    fit([gemm_table()], out, recipes=[TINY])
    return out


def test_fitted_table_is_reproduced(fitted: Path) -> None:
    model = KernelModel.load(fitted)
    table = gemm_table()
    error = model.table_times(table).time_s * 1e6 / table["time_us"] - 1
    assert np.mean(np.abs(error)) < 0.25
    first = table.iloc[0]
    times = model.times(
        device(first["device"]), [Gemm(m=int(first["m"]), n=int(first["n"]), k=int(first["k"]))]
    )
    assert times.provenance[0] in ("measured", "learned")
    assert times.lo_s[0] <= times.time_s[0] <= times.hi_s[0]


def test_families_it_lacks_come_from_the_shipped_weights(fitted: Path) -> None:
    from perfmodel.ops import MemoryBound

    times = KernelModel.load(fitted).times(
        device("A100-SXM4-80GB"), [MemoryBound(op="gelu", rows=4096, hidden=4096)]
    )
    assert np.isfinite(times.time_s).all()


def test_summary_has_fractions(tmp_path: Path) -> None:
    progress: list[str] = []
    summary = fit(
        [gemm_table()], tmp_path, recipes=[TINY], progress=lambda what, *_: progress.append(what)
    )
    assert set(summary["gemm"]) == {
        "rows",
        "kept_out",
        "set_aside",
        "mean_ape",
        "median_ape",
        "coverage_90",
    }
    assert 0 < summary["gemm"]["mean_ape"] < 1
    assert any("all rows" in line for line in progress)
    assert not list(tmp_path.glob("*.ckpt.npz"))


def test_same_inputs_are_not_fitted_twice(fitted: Path) -> None:
    stamp = (fitted / "gemm.safetensors").stat().st_mtime_ns
    fit([gemm_table()], fitted, recipes=[TINY])
    assert (fitted / "gemm.safetensors").stat().st_mtime_ns == stamp
    fit([gemm_table()], fitted, recipes=[TINY], seed=1)
    assert (fitted / "gemm.safetensors").stat().st_mtime_ns != stamp


def test_training_is_deterministic_and_resumes(tmp_path: Path) -> None:
    samples = gather([gemm_table()], "gemm", ())
    code = KindCode.of(samples.rows.kinds)
    base = fit_base(samples)
    everything = np.arange(len(samples))

    def run(
        report: Callable[[int, int, float], None] | None = None, checkpoint: Path | None = None
    ) -> np.ndarray:
        training = Training(
            samples, base, code, TINY, fit_on=everything, report=report, checkpoint=checkpoint
        )
        return train(training).kernels[0]

    class Stop(Exception):
        pass

    def stop_half_way(now: int, steps: int, error: float) -> None:
        if now > steps // 2:
            raise Stop

    whole = run()
    np.testing.assert_array_equal(whole, run())
    path = Stages("gemm", tmp_path).checkpoint("all")
    with pytest.raises(Stop):
        run(stop_half_way, path)
    np.testing.assert_array_equal(whole, run(checkpoint=path))


def test_trainings_on_the_same_stacks_share_one_compiled_step() -> None:
    samples = gather([gemm_table()], "gemm", ())
    code, base, at = KindCode.of(samples.rows.kinds), fit_base(samples), np.arange(len(samples))
    start = train(Training(samples, base, code, TINY, fit_on=at))
    compiled = _step._cache_size()
    faster = replace(TINY, learning_rate=1e-3)
    train(Training(samples, base, code, faster, fit_on=at[5:], steps=10, start=start, seed=1))
    assert _step._cache_size() == compiled


def test_members_are_averaged_saved_and_resumed(tmp_path: Path) -> None:
    samples = gather([gemm_table(60)], "gemm", ())
    recipe = replace(TINY, members=2, steps=8, refit_steps=4, left_out_steps=4)
    regressor = fit_regressor(samples, recipe, seed=3)
    asked = PriceQuery(
        samples.rows, (Query(samples.stacks[0].figures),), np.zeros(len(samples), np.int64)
    )
    each = [
        replace(regressor, params=member(regressor.params, i)).predict(asked).log_time
        for i in (0, 1)
    ]
    assert np.abs(each[0] - each[1]).max() > 1e-4
    whole = regressor.predict(asked).log_time
    np.testing.assert_allclose(whole, np.mean(each, axis=0), rtol=1e-6)
    again = load_regressor(save_regressor(regressor, tmp_path))
    # tables are kept as float16
    np.testing.assert_allclose(again.predict(asked).log_time, whole, rtol=1e-3)


def test_members_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    samples = gather([gemm_table(60)], "gemm", ())
    code, base = KindCode.of(samples.rows.kinds), fit_base(samples)
    recipe = replace(TINY, members=2, steps=40)
    at = np.arange(len(samples))
    path = Stages("gemm", tmp_path).checkpoint("all")
    seen: list[int] = []

    def stop_in_the_second(now: int, steps: int, error: float) -> None:
        seen.append(now)
        if now > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_members(
            Training(
                samples, base, code, recipe, fit_on=at, report=stop_in_the_second, checkpoint=path
            )
        )
    resumed = train_members(Training(samples, base, code, recipe, fit_on=at, checkpoint=path))
    whole = train_members(Training(samples, base, code, recipe, fit_on=at))
    np.testing.assert_array_equal(resumed.kernels[0], whole.kernels[0])
    assert seen == sorted(seen)
    assert len(list(tmp_path.glob(".gemm.*.ckpt.npz"))) == 2


def test_damaged_checkpoint_is_ignored(tmp_path: Path) -> None:
    samples = gather([gemm_table(40)], "gemm", ())
    code = KindCode.of(samples.rows.kinds)
    path = tmp_path / "broken.npz"
    path.write_bytes(b"PK not a zip")
    recipe = replace(TINY, steps=4)
    base, everything = fit_base(samples), np.arange(len(samples))
    train(Training(samples, base, code, recipe, fit_on=everything, checkpoint=path))


def test_whole_shapes_are_kept_out() -> None:
    table = pd.concat([gemm_table(400), gemm_table(400).assign(software="other")])
    samples = gather([table], "gemm", ())
    fit_on, check_on, test = split(samples, 0.2)
    keys = [set(samples.shape_key[index].tolist()) for index in (fit_on, check_on, test)]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert not keys[0] & keys[1]
    assert len(fit_on) + len(check_on) + len(test) == len(samples)


def test_repeats_are_merged_to_their_median() -> None:
    table = gemm_table(3).iloc[[0, 0, 0]].assign(time_us=[1.0, 2.0, 30.0])
    samples = gather([table], "gemm", ())
    np.testing.assert_allclose(samples.time_s, [2e-6])


def test_suspect_rows_are_not_fitted() -> None:
    table = pd.concat(
        [gemm_table(20), gemm_table(20, seed=1).assign(variant="suspect:above_peak_flops")]
    )
    assert len(gather([table], "gemm", ())) <= 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_us": np.nan}, "time_us"),
        ({"time_us": -1.0}, "time_us"),
        ({"m": -4.0}, "m must be"),
        ({"device": "Abacus"}, "Abacus"),
        ({"op_family": "weaving"}, "no row"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "table.csv"
    gemm_table(10).assign(**change).to_csv(path, index=False)
    with pytest.raises(TableError, match=message):
        fit([path], tmp_path / "out", recipes=[TINY])


def test_times_without_a_unit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    gemm_table(10).rename(columns={"time_us": "time"}).to_csv(path, index=False)
    with pytest.raises(TableError, match="unit"):
        fit([path], tmp_path / "out", recipes=[TINY])


def test_missing_calibration_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="this calibration does not exist"):
        KernelModel.load(tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match="has no weights"):
        KernelModel.load(tmp_path)


def test_truncated_weights_are_refused(fitted: Path, tmp_path: Path) -> None:
    data = (fitted / "gemm.safetensors").read_bytes()
    for keep in (4, len(data) // 2, len(data) - 8):
        (tmp_path / "gemm.safetensors").write_bytes(data[:keep])
        with pytest.raises(CalibrationError, match="truncated"):
            load_regressor(tmp_path / "gemm.safetensors")


def rewritten(fitted: Path, path: Path, metadata: dict[str, str], poison: bool = False) -> Path:
    """A copy of fitted weights with changed metadata or a NaN."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save

    arrays = load_file(fitted / "gemm.safetensors")
    with safe_open(fitted / "gemm.safetensors", framework="numpy") as file:
        old = file.metadata()
    if poison:
        arrays["mean"][0] = np.nan
    path.write_bytes(sealed(save(arrays, {**old, **metadata, "checksum": UNSEALED})))
    return path


def test_other_schema_version_is_refused(fitted: Path, tmp_path: Path) -> None:
    path = rewritten(fitted, tmp_path / "gemm.safetensors", {"schema_version": "999"})
    with pytest.raises(CalibrationError, match="schema version 999"):
        load_regressor(path)
    path = rewritten(fitted, tmp_path / "gemm.safetensors", {"format": "something else"})
    with pytest.raises(CalibrationError, match="not a kernel weights file"):
        load_regressor(path)
    path = rewritten(fitted, tmp_path / "gemm.safetensors", {"description": "{}"})
    with pytest.raises(CalibrationError, match="lacks"):
        load_regressor(path)


def test_weights_that_are_not_finite_are_refused(fitted: Path, tmp_path: Path) -> None:
    path = rewritten(fitted, tmp_path / "gemm.safetensors", {}, poison=True)
    with pytest.raises(CalibrationError, match="not finite"):
        load_regressor(path)


def test_weights_round_trip(fitted: Path, tmp_path: Path) -> None:
    from perfmodel.cost.learn import save_regressor

    first = load_regressor(fitted / "gemm.safetensors")
    again = load_regressor(save_regressor(first, tmp_path))
    assert again.stacks == first.stacks
    assert again.intervals == first.intervals
    for a, b in zip(first.params.kernels, again.params.kernels, strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_shapes_and_devices_left_out_are_reported() -> None:
    table = gemm_table(1400).assign(k=lambda frame: frame["k"] + np.arange(1400))  # no two alike
    samples = gather([table], "gemm", ())
    record = fit_regressor(samples, replace(TINY, steps=8, refit_steps=4, left_out_steps=4)).record
    assert record["large_left_out"]["n"] >= 50
    assert set(record["device_left_out"]) == {"A100-SXM4-80GB", "H100-SXM5-80GB"}
