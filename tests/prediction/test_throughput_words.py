"""Throughput is printed in the unit that people count a model's samples in."""

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.prediction import Prediction
from perfmodel.prediction.text import throughput_words
from perfmodel.spec.sample_units import sample_unit


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        ("llama3-8b", "tokens"),
        ("bert-large", "tokens"),
        ("t5-base", "tokens"),
        ("resnet-50", "images"),
        ("vit-l-16", "images"),
        ("dit-l-2", "images"),
        ("flux-dev", "images"),
        ("sdxl", "images"),
        ("wan2.1-1.3b", "videos"),
        ("mlp-1b", "samples"),
    ],
)
def test_models_are_counted_in_their_own_samples(model: str, unit: str) -> None:
    assert sample_unit(catalog.model(model)) == unit


def _rate(words: str) -> float:
    number, _ = words.split()
    return float(number.replace(",", ""))


@pytest.mark.parametrize(("model", "unit"), [("vit-l-16", "images"), ("gpt2-345m", "tokens")])
def test_the_rate_is_that_of_the_step(model: str, unit: str) -> None:
    prediction: Prediction = pm.predict(model, "dgx-a100", "dp=8,micro_batch=4", global_batch=64)
    samples = 64 if unit == "images" else 64 * prediction.seq_len
    assert throughput_words(prediction).endswith(f" {unit}/s")
    for devices in (1, prediction.devices):
        per_s = samples / prediction.step_time_s / devices
        assert _rate(throughput_words(prediction, devices)) == pytest.approx(per_s, rel=5e-3)
    assert f" {unit}/s per device" in str(prediction)
    # The keys of the contract stay as they are.
    tokens_per_s = 64 * prediction.seq_len / prediction.step_time_s / prediction.devices
    assert prediction.to_dict()["tokens_per_s_per_device"] == pytest.approx(tokens_per_s)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ("resnet-50", "global batch of 64 images"),
        ("vit-l-16", "global batch of 64 images (197 tokens each)"),
        ("mlp-1b", "global batch of 64 samples"),
        ("gpt2-345m", "global batch 64, sequence 1024"),
    ],
)
def test_every_text_describes_the_batch_in_the_same_samples(model: str, batch: str) -> None:
    layout = "dp=8,micro_batch=8"
    prediction: Prediction = pm.predict(model, "dgx-a100", layout, global_batch=64)
    unit = prediction.sample_unit
    assert f"dgx-a100, {batch}\n" in str(prediction)
    html = prediction._repr_html_()
    assert batch in html
    assert ("tokens per second" in html) == (unit == "tokens")
    assert unit == "tokens" or f"{unit} per second" in html

    found = pm.search(model, "dgx-a100", devices=8, global_batch=64, top=1)
    assert f"dgx-a100, {batch}\n" in str(found)
    assert f" {unit}/s" in str(found)


@pytest.mark.parametrize("model", ["vit-l-16", "resnet-50", "gpt2-345m"])
def test_throughput_at_a_measured_step(model: str) -> None:
    prediction: Prediction = pm.predict(model, "dgx-a100", "dp=8,micro_batch=4", global_batch=64)
    twice = throughput_words(prediction, 8, step_s=2 * prediction.step_time_s)
    assert _rate(twice) == pytest.approx(_rate(throughput_words(prediction, 8)) / 2, rel=1e-2)
    per_s = prediction.samples_per_s * prediction.tokens_per_counted_sample
    tokens_per_s = prediction.tokens_per_s_per_device * prediction.devices
    if prediction.sample_unit == "tokens":
        assert per_s * prediction.seq_len == pytest.approx(tokens_per_s)
    else:
        assert per_s == pytest.approx(tokens_per_s)
