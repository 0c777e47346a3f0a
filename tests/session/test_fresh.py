"""No answer depends on what was asked before: sequences of questions against fresh sessions and
fresh processes."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import asked as questions
import pytest
from asked import LAYOUTS, SETTINGS, PriceQuery
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.session import Session

FACTORS = st.sampled_from([0.5, 1.0, 2.0])
DEVICE = (
    "peak",
    "memory_bandwidth_bytes_per_s",
    "compute_units",
    "clock_hz",
    "l2_bytes",
    "memory_bytes",
    "link_bandwidth_bytes_per_s",
    "host_bandwidth_bytes_per_s",
)
LEVEL = ("bandwidth_bytes_per_s", "latency_s")


def _factors(names: tuple[str, ...]) -> st.SearchStrategy[tuple[tuple[str, float], ...]]:
    return st.lists(
        st.tuples(st.sampled_from(names), FACTORS), max_size=2, unique_by=lambda one: one[0]
    ).map(tuple)


def asked() -> st.SearchStrategy[PriceQuery]:
    rate = st.sampled_from([100.0, 200.0, 300.0])
    return st.builds(
        PriceQuery,
        kind=st.sampled_from(["predict", "predict", "predict", "whatif", "compare", "search"]),
        layout=st.sampled_from(LAYOUTS),
        layers=st.sampled_from([4, 8]),
        batch=st.sampled_from([16, 32]),
        dtype=st.sampled_from(["bf16", "bf16", "fp16", "fp32"]),
        compiled=st.booleans(),
        device=_factors(DEVICE),
        levels=_factors(LEVEL),
        cluster_file=st.none() | st.tuples(rate, rate, rate, rate),
        schedule_file=st.none() | st.none() | st.integers(0, 2),
        weights=st.none() | st.integers(0, 2),
        settings=st.lists(st.sampled_from(SETTINGS), max_size=2, unique=True).map(tuple),
    )


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    return questions.fits(tmp_path_factory.mktemp("fits"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@given(st.lists(asked(), min_size=2, max_size=4))
@settings(max_examples=4, deadline=None)
def test_a_session_that_has_answered_others_answers_as_a_fresh_one(
    folder: Path, fits: list[dict[str, bytes]], sequence: list[PriceQuery]
) -> None:
    with pytest.MonkeyPatch.context() as patch, Session():
        for one in sequence:
            patch.setenv("PERFMODEL_CACHE_LIMIT_GB", "1")
            patch.setenv("PERFMODEL_CACHE", str(folder / "cache"))
            found = one.put(folder, fits)
            patch.setenv("PERFMODEL_CACHE_LIMIT_GB", "0")
            patch.setenv("PERFMODEL_CACHE", str(folder / "none"))
            with Session():
                assert one.answer(folder) == found


FAST = (("peak", 2.0), ("power_w", 4.0))  # or the power limit holds products back
SEQUENCE = [
    PriceQuery(),
    PriceQuery(device=FAST),
    PriceQuery(device=(("clock_hz", 2.0), ("l2_bytes", 0.5)), layout=LAYOUTS[1]),
    PriceQuery(kind="search", settings=SETTINGS[:2]),
    PriceQuery(cluster_file=(300.0, 2000.0, 300.0, 25.0)),
    PriceQuery(cluster_file=(600.0, 2000.0, 300.0, 12.0)),
    PriceQuery(schedule_file=0),
    PriceQuery(schedule_file=1),
    PriceQuery(weights=1),
    PriceQuery(weights=2, kind="whatif", settings=("inter_node_bandwidth=0.5x",)),
    PriceQuery(weights=2, kind="search"),
]


@pytest.mark.slow
def test_a_process_that_has_answered_others_answers_as_a_fresh_one(
    tmp_path: Path, fits: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "cache"))
    found = [one.put(tmp_path, fits) for one in SEQUENCE]
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", "0")
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "none"))
    fresh = subprocess.run(
        [sys.executable, questions.__file__],
        input=pickle.dumps((SEQUENCE, tmp_path, fits)),
        capture_output=True,
    )
    assert fresh.returncode == 0, fresh.stderr.decode()
    for one, here, there in zip(SEQUENCE, found, json.loads(fresh.stdout), strict=True):
        assert here == there, one
    assert len(set(found)) == len(found)


def test_figures_of_a_device_count_whatever_its_name(
    tmp_path: Path, fits: list[dict[str, bytes]]
) -> None:
    """Doubled peak rates shorten a step that products fill, asked second as asked first."""
    slow, fast = PriceQuery(batch=64), replace(PriceQuery(batch=64), device=FAST)
    with Session():
        first = json.loads(slow.put(tmp_path, fits))["step_time_s"]
        then = json.loads(fast.put(tmp_path, fits))["step_time_s"]
    assert then < 0.95 * first  # launches and transfers take as long as before
