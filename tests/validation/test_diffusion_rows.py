"""Rows and job files of diffusion transformers that read text, as tables of runs state them."""

from typing import Any

import pytest

from perfmodel import catalog, predict
from perfmodel.catalog import job_files
from perfmodel.validation import read_case

FLUX: dict[str, Any] = {
    "case_id": "flux",
    "model": "flux-dev",
    "family": "mmdit",
    "device": "H100-SXM5-80GB",
    "n_devices": "8",
    "devices_per_node": "8",
    "dtype": "bf16",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "zero_stage": "3",
    "micro_batch": "2",
    "global_batch": "16",
}
WAN: dict[str, Any] = FLUX | {
    "case_id": "wan",
    "model": "wan2.1-14B",
    "family": "video diffusion transformer",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "kv_heads": "40",
    "ffn_hidden": "13824",
    "seq_len": "37440",
    "n_devices": "32",
    "dp": "16",
    "cp": "2",
    "micro_batch": "1",
    "global_batch": "64",
}


@pytest.mark.parametrize(
    ("row", "name", "tokens"), [(FLUX, "flux.1-dev", 4096), (WAN, "wan2.1-t2v-14b", 37440)]
)
def test_a_row_is_the_model_of_the_catalog(row: dict[str, Any], name: str, tokens: int) -> None:
    """Sizes beside a name are those of the catalog; an image's tokens are the catalog's unless the
    row states others."""
    case = read_case(row)
    assert case.model == catalog.model(name)
    assert case.job.seq_len == tokens
    predicted = predict(
        case.model, case.cluster, case.layout, global_batch=case.job.global_batch, seq_len=tokens
    )
    assert 0 < predicted.step_time_s < 100


def test_a_job_file_names_a_model_of_text_and_image() -> None:
    described = {
        "model": {"like": "stable-diffusion-3-medium", "text_condition": {"tokens": 333}},
        "cluster": "dgx-h100",
        "devices": 8,
        "job": {"global_batch": 64},
    }
    problem, _ = catalog.problem_and_layout(job_files.job_from_toml(described, "job.toml"))
    model: Any = problem.model
    assert model.inputs.text_condition.tokens == 333
    assert model.inputs.text_condition.pooled == 2048
    assert problem.job.seq_len == 4096
