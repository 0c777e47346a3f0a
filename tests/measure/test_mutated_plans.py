"""Whatever is wrong in a plan: a plan of sound ops, or one line that says what is wrong."""

import tomllib
from pathlib import Path

import pytest
from mutations import mutations, refusal, toml_text

from perfmodel.errors import PerfModelError
from perfmodel.measure import read_plan

PLANS = sorted((Path(__file__).parents[2] / "calibrate").glob("*.toml"))


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_a_mutated_plan_is_sound_or_refused(plan: Path, tmp_path: Path):
    path = tmp_path / "plan.toml"
    data = _shortened(tomllib.loads(plan.read_text()))
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


def _shortened(data: dict) -> dict:
    """The first entry of each family and collective, with the first two values of every list."""
    out = dict(data)
    for name in ("kernels", "collectives"):
        kept: dict[str, dict] = {}
        for entry in data.get(name, []):
            kept.setdefault(str(entry.get("family", entry.get("collective"))), entry)
        out[name] = [{k: v[:2] if isinstance(v, list) else v for k, v in entry.items()} for entry in kept.values()]
    return out
