"""Whatever is wrong in a plan: a plan of sound ops, or one line that says what is wrong."""

import tomllib
from pathlib import Path

import pytest
from mutations import mutations, refusal, toml_text

from perfmodel.errors import PerfModelError
from perfmodel.measure import read_plan

PLANS = sorted((Path(__file__).parents[2] / "calibrate").glob("*.toml"))


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_every_plan_is_read(plan: Path):
    found = read_plan(plan)
    assert found.kernels or found.cold_kernels or found.collectives


def test_a_mutated_plan_is_sound_or_refused(tmp_path: Path):
    path = tmp_path / "plan.toml"
    data = _all_kinds()
    path.write_text(toml_text(data))
    read_plan(path)
    for what, changed in mutations(data):
        path.write_text(toml_text(changed))
        try:
            found = read_plan(path)
        except PerfModelError as error:
            refusal(error, what)
            continue
        for op in (*found.kernels, *found.cold_kernels):
            assert 0 <= op.flops < float("inf"), what
            assert 0 <= op.bytes < float("inf"), what
        for op in found.collectives:
            assert op.num_ranks >= 1, what
            assert 0 <= op.bytes < float("inf"), what


def _all_kinds() -> dict:
    """A plan with what all plans have: every key, and of every family and collective the entry with
    most keys, with the first value of every list."""
    plans = [tomllib.loads(plan.read_text()) for plan in PLANS]
    out = {key: value for data in plans for key, value in data.items()}
    for name in ("kernels", "collectives"):
        kept: dict[str, dict] = {}
        for entry in sorted((entry for data in plans for entry in data.get(name, [])), key=len):
            kept[str(entry.get("family", entry.get("collective")))] = entry
        out[name] = [
            {k: v[:1] if isinstance(v, list) else v for k, v in entry.items()}
            for entry in kept.values()
        ]
    return out
