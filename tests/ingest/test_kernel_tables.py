"""Measured kernels made plain on reading: what a source means by its columns stays with the
readers."""

import re
from pathlib import Path

import pandas as pd
import pytest

import perfmodel
from perfmodel.ingest import OWN_ORDER, clean_kernels

ROW = {
    "device": "A100-SXM4-80GB",
    "op_family": "gemm",
    "op": "linear",
    "dtype": "fp32",
    "time_us": 10.0,
}
DOWNLOADS = (
    "vllm",
    "Phi-mini",
    "llmservingsim",
    "neusight",
    "aceso",
    "xla_perf",
    "deepbench",
    "pipedream",
    "vidur",
    "trtllm",
    "sglang",
    "simumax",
    "aiconfigurator",
    "estimate_train_time",
)


def clean(**columns: object) -> pd.DataFrame:
    return clean_kernels(pd.DataFrame([{**ROW, **columns}]))


def test_what_is_clean_stays_as_it_is():
    once = clean(
        source="llmservingsim",
        software="vllm",
        op_family="attention",
        phase="decode",
        batch=4,
        seq_q=1,
        seq_kv=64,
    )
    assert once["seq_kv"].tolist() == [17]
    assert clean_kernels(once) is once


@pytest.mark.parametrize(
    ("source", "device", "dtype"),
    [
        ("sailor_aceso", "A100-SXM4-80GB", "tf32"),
        ("sailor_aceso", "V100-SXM2-16GB", "fp32"),
        ("lab", "L4", "fp32"),
        ("sailor_aceso", "MI250", "fp32"),
        ("sailor_aceso", "Abacus", "fp32"),
    ],
)
def test_products_in_tf32_are_called_so(source: str, device: str, dtype: str):
    assert clean(source=source, device=device)["dtype"].tolist() == [dtype]


def test_own_measurements_stand_for_training_before_all_public_ones():
    own, profiler, eager = (
        clean(source=s)["order"][0] for s in ("my lab", "estimate_train_time", "neusight")
    )
    assert own == OWN_ORDER < profiler < eager
    assert (
        clean(source="aiconfigurator", software="vllm-0.24.0")["order"][0]
        < clean(source="vidur")["order"][0]
    )


def test_only_eager_sources_time_the_launch():
    assert [bool(clean(source=s)["host_launch"][0]) for s in ("neusight", "vidur", "my lab")] == [
        True,
        False,
        False,
    ]


def test_nothing_decodes_beside_pure_decoding():
    mixed = {"op_family": "attention", "seq_kv": 64, "mixed_n_decode": 8, "mixed_kv_decode": 100}
    assert clean(**mixed, seq_q=1)["mixed_n_decode"].tolist() == [0]
    assert clean(**mixed, seq_q=128)[["mixed_n_decode", "mixed_kv_decode"]].to_numpy().tolist() == [
        [8, 100]
    ]


def test_no_download_is_named_beyond_the_readers():
    package = Path(perfmodel.__file__).parent
    named = [
        (path.name, word)
        for room in ("learn", "cost")
        for path in (package / room).glob("*.py")
        for word in DOWNLOADS
        if re.search(rf"[\"'`]\W*{word}", path.read_text())
    ]
    assert not named
