"""Logs of training runs: every format gives the step times, the memory and the events that were
written into it."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from written_logs import FORMATS, WrittenRun, write_log

from perfmodel.errors import TableError
from perfmodel.ingest.logs import LOG_FORMATS, LoggedStep, TrainingLog, parse_log, read_log
from perfmodel.units import GIB

STEP_S = [40.0, 6.51, 6.49, 6.5, 6.52, 6.48]
NAMES = {"megatron-bridge": "megatron"}


def seconds(log: TrainingLog, run: WrittenRun) -> list[float | None]:
    tokens = run.global_batch * run.seq_len
    return [step.seconds_of(tokens, run.devices, run.global_batch) for step in log.steps]


@pytest.mark.parametrize("form", FORMATS)
def test_step_times_of_every_format_are_those_written(form: str) -> None:
    run = WrittenRun(step_s=STEP_S)
    log = parse_log(write_log(form, run))
    assert log.format == NAMES.get(form, form)
    # nanotron shortens to three digits, progress bars to hundredths of a second
    assert seconds(log, run) == pytest.approx(STEP_S, rel=3e-3)
    assert [step.step - log.steps[0].step for step in log.steps] == [0, 1, 2, 3, 4, 5]


def test_every_format_has_a_name_in_the_public_list() -> None:
    assert {NAMES.get(form, form) for form in FORMATS} == set(LOG_FORMATS)


@pytest.mark.parametrize(
    "prefix",
    ["0: ", "[default7]:", "node3 | ", "2025-03-04T10:00:00.123456789Z ", "[1,0]<stdout>:"],
)
@pytest.mark.parametrize("form", FORMATS)
def test_what_launchers_and_containers_write_before_every_line(form: str, prefix: str) -> None:
    run = WrittenRun(
        step_s=STEP_S,
        settings={"tensor_model_parallel_size": 8},
        timers_ms={"forward-compute": (2000.0, 2100.0)},
        checkpoints=[2],
    )
    plain = write_log(form, run).replace("\r", "")
    log = parse_log("\n".join(prefix + line for line in plain.splitlines()))
    assert seconds(log, run) == pytest.approx(STEP_S, rel=3e-3)
    assert log.settings["tp"] == 8
    assert log.count("checkpoint") == 1
    assert ("compute" in log.timers) == form.startswith("megatron")


@pytest.mark.parametrize(
    "form", ["megatron", "megatron-bridge", "torchtitan", "nanotron", "composer"]
)
def test_peak_memory_is_in_bytes(form: str) -> None:
    log = parse_log(write_log(form, WrittenRun(step_s=STEP_S, reserved_gib=61.5)))
    assert log.reserved_bytes == pytest.approx(61.5 * GIB, rel=2e-3)


def test_deepspeed_reports_allocated_memory() -> None:
    log = parse_log(write_log("deepspeed", WrittenRun(step_s=STEP_S, reserved_gib=50.0)))
    assert log.allocated_bytes == pytest.approx(45.0 * GIB)


# Bytes of tensors and of what the allocator holds, as libraries print them.
MEMORY_LINES = {
    "Megatron-LM": (
        "memory (MB) | allocated: 1.0 | max allocated: 1024.0 | max reserved: 2048.0",
        (GIB, 2 * GIB),
    ),
    "nanotron": (
        "Memory usage: 1.00MiB. Peak allocated 512.00MiB. Peak reserved: 1536.00MiB",
        (GIB / 2, 1.5 * GIB),
    ),
    "DeepSpeed": ("MemAllocated=6.01GB, MaxMemAllocated=19.5GB", (19.5 * GIB, None)),
    "Composer": ("Train memory/peak_allocated_mem: 41.5", (41.5e9, None)),
    "Composer, reserved": ("Train memory/peak_reserved_mem: 45.5", (None, 45.5e9)),
    "MaxText": ("Using (GB) 61.5 / 95.74 (64.2%) on TPU_0", (61.5e9, None)),
    "peak in bytes": ("peak_memory_usage: 66000000000", (66e9, None)),
    "torchtune": (
        "peak_memory_active:40 peak_memory_alloc:41.5 peak_memory_reserved:60.25",
        (41.5 * GIB, 60.25 * GIB),
    ),
    "NeMo AutoModel": ("| mem 61.5 GiB | tps", (61.5 * GIB, None)),
    "xtuner": (
        "Iter(train) [ 10/1000]  lr: 2e-05  time: 6.19  memory: 61440  loss: 1.2",
        (60 * GIB, None),
    ),
    "axolotl": (
        "{'memory/max_allocated (GiB)': 41.5, 'memory/device_reserved (GiB)': 60.25}",
        (41.5 * GIB, 60.25 * GIB),
    ),
    "torchtitan": ("memory: 61.5GiB(77.65%)", (None, 61.5 * GIB)),
    "PaddleNLP": (
        "global_step: 1, max_memory_allocated: 41.5, max_memory_reserved: 60.25, interval_runtime: 1.1",
        (41.5 * GIB, 60.25 * GIB),
    ),
    "nanotron's fields": ("| cuda_max_memory_reserved: 64.5G |", (None, 64.5e9)),
    "MS-Swift": ("{'memory(GiB)': 61.5}", (None, 61.5 * GIB)),
}


@pytest.mark.parametrize("name", list(MEMORY_LINES))
def test_memory_is_read_in_the_unit_of_each_library(name: str) -> None:
    """The largest of all ranks and times counts."""
    line, expected = MEMORY_LINES[name]
    steps = write_log("maxtext", WrittenRun(step_s=STEP_S))
    smaller = re.sub(r"[1-9]", "1", line)
    log = parse_log("\n".join([smaller, line, steps, smaller]))
    assert (log.allocated_bytes, log.reserved_bytes) == pytest.approx(expected)


RESOLUTION_S = {"torchtitan": 2e-3, "deepspeed": 2e-3, "composer": 0.4}
"""Of the clocks of formats; all others print whole seconds."""


@pytest.mark.parametrize(
    "form",
    [
        form
        for form in FORMATS
        if form
        not in ("megatron-bridge", "nemo", "maxtext", "torchtune", "xtuner", "nanogpt", "llm.c")
    ],
)
def test_clocks_of_lines_are_as_far_apart_as_their_steps(form: str) -> None:
    step_s = [40.0, 6.51, 7200.25, 100_000.5, 6.52, 6.48]
    clocks = [step.clock_s for step in parse_log(write_log(form, WrittenRun(step_s=step_s))).steps]
    passed_s = [
        after - before for before, after in pairwise(clock for clock in clocks if clock is not None)
    ]
    assert passed_s == pytest.approx(step_s[1:], abs=RESOLUTION_S.get(form, 1.0))


@pytest.mark.parametrize("form", FORMATS)
def test_evaluations_are_seen_between_steps(form: str) -> None:
    log = parse_log(write_log(form, WrittenRun(step_s=STEP_S, evaluations=[2, 5])))
    first = log.steps[0].step
    assert [(event.kind, event.after_step - first) for event in log.events] == [
        ("evaluation", 1),
        ("evaluation", 4),
    ]


def test_loss_scales_are_those_of_each_step() -> None:
    log = parse_log(write_log("megatron", WrittenRun(step_s=STEP_S, skipped=[3])))
    assert [step.loss_scale for step in log.steps] == [
        65536.0,
        65536.0,
        32768.0,
        65536.0,
        65536.0,
        65536.0,
    ]
    assert [step.skipped_steps for step in log.steps] == [0, 0, 1, 0, 0, 0]


def test_retries_of_the_allocator_are_seen() -> None:
    """DeepSpeed's warning, torchtitan's, and the count of ranks that each report the same one."""
    warnings = (
        "[WARNING] [stage3.py:2104:step] 1 pytorch allocator cache flushes since last step.",
        "[titan] WARNING - 3 CUDA memory allocation retries.",
        "num cudaMalloc retries: 2",
    )
    lines = write_log("maxtext", WrittenRun(step_s=STEP_S)).splitlines()
    for warning in warnings:
        log = parse_log("\n".join([*lines[:2], warning, warning, *lines[2:4], warning, *lines[4:]]))
        assert [(event.kind, event.after_step) for event in log.events] == [
            ("allocator_retry", 2),
            ("allocator_retry", 4),
        ]


@pytest.mark.parametrize("form", FORMATS)
def test_checkpoints_are_seen_between_steps(form: str) -> None:
    run = WrittenRun(step_s=STEP_S, checkpoints=[2, 4], pause_after_s={2: 30.0, 4: 31.0})
    log = parse_log(write_log(form, run))
    first = log.steps[0].step
    assert [event.after_step - first for event in log.events] == [1, 3]
    assert {event.kind for event in log.events} == {"checkpoint"}
    if form in ("megatron", "megatron-bridge", "torchtitan"):
        assert [event.seconds for event in log.events] == pytest.approx([30.0, 31.0])


@pytest.mark.parametrize("form", ["megatron", "deepspeed"])
def test_skipped_updates_are_counted(form: str) -> None:
    log = parse_log(write_log(form, WrittenRun(step_s=STEP_S, skipped=[3, 5])))
    assert sum(step.skipped_steps for step in log.steps) + log.count("overflow") == 2


def test_a_restart_is_where_steps_go_back() -> None:
    text = write_log("megatron", WrittenRun(step_s=STEP_S))
    log = parse_log(text + text)
    assert log.count("restart") == 1
    assert len(log.steps) == 12


def test_lines_of_several_ranks_count_once() -> None:
    lines = write_log("torchtitan", WrittenRun(step_s=STEP_S)).splitlines()
    both = [line for one in lines for line in (one, one.replace("rank0", "rank1"))]
    assert len(parse_log("\n".join(both)).steps) == len(STEP_S)


def test_megatron_timers_by_phase() -> None:
    timers_ms = {
        "forward-compute": (2000.0, 2100.0),
        "backward-compute": (4000.0, 4300.0),
        "batch-generator": (5.0, 90.0),
        "all-grads-sync": (20.0, 310.0),
        "optimizer": (30.0, 31.0),
    }
    log = parse_log(write_log("megatron", WrittenRun(step_s=STEP_S, timers_ms=timers_ms)))
    assert (log.timers["compute"].least_s, log.timers["compute"].most_s) == pytest.approx(
        (6.0, 6.4)
    )
    assert (log.timers["data"].least_s, log.timers["data"].most_s) == pytest.approx((0.005, 0.09))
    assert log.timers["gradient_sync"].most_s == pytest.approx(0.31)


def test_timers_of_a_phase_add_up_and_a_single_number_is_that_of_the_slowest_rank() -> None:
    """Each is the median over the steps, which leaves out one that is long."""
    steps = [
        {
            "all-grads-sync": 100.0 * factor,
            "grads-reduce-scatter": 20.0 * factor,
            "params-all-gather": 7.0 * factor,
        }
        for factor in (50, 1, 1)
    ]
    lines = [
        f"    {name} ......: {value:.2f}"
        for timers_ms in steps
        for name, value in timers_ms.items()
    ]
    timers = parse_log(write_log("megatron", WrittenRun(step_s=STEP_S)) + "\n".join(lines)).timers
    assert timers["gradient_sync"].least_s == timers["gradient_sync"].most_s == pytest.approx(0.12)
    assert timers["weight_gather"].least_s == timers["weight_gather"].most_s == pytest.approx(0.007)


def test_deepspeed_timers_by_phase() -> None:
    text = write_log("deepspeed", WrittenRun(step_s=STEP_S))
    text += (
        "[2024-04-21 02:45:40,723] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: 3865.91 | bwd: 11249.43 | "
        "bwd_inner: 10520.18 | bwd_allreduce: 729.09 | step: 888.45\n"
    )
    timers = parse_log(text).timers
    assert timers["compute"].most_s == pytest.approx(3.86591 + 10.52018)
    assert timers["gradient_sync"].least_s == pytest.approx(0.72909)


HEADS = {
    "megatron arguments": (
        "  tensor_model_parallel_size ...................... 8\n  pipeline_model_parallel_size .. 4\n"
        "  overlap_grad_reduce ............................. False\n"
        "  world_size ...................................... 64\n",
        {"tp": 8, "pp": 4, "overlap_grad_reduce": False, "devices": 64},
    ),
    "torchtitan mesh": (
        "[titan] 2025-01-10 12:00:00,123 - root - INFO - Building 2-D device mesh with ['dp_shard', 'tp'], [8, 4]\n"
        "[titan] INFO - Trainer is initialized with local batch size 8, global batch size 64, gradient accumulation "
        "steps 1, sequence length 8192, total steps 1000 (warmup 200).\n",
        {"tp": 4, "global_batch": 64, "seq_len": 8192},
    ),
    "nanotron configuration": (
        "[INFO|DP=0|PP=0|TP=0]: Config(general=GeneralArgs(project='x'),\n    parallelism=ParallelismArgs(dp=2,\n"
        "        pp=4,\n        tp=8,\n",
        {"dp": 2, "pp": 4, "tp": 8},
    ),
    "deepspeed configuration": (
        "[2024-01-01 12:00:00,123] [INFO] [config.py:1002:print]   train_batch_size ............. 256\n"
        "[2024-01-01 12:00:00,123] [INFO] [config.py:1002:print]   train_micro_batch_size_per_gpu  4\n",
        {"global_batch": 256, "micro_batch": 4},
    ),
    "trainer": (
        "  Instantaneous batch size per device = 4\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 1,024\n",
        {"micro_batch": 4, "global_batch": 1024},
    ),
    "maxtext configuration": ("Config param max_target_length: 2048\n", {"seq_len": 2048}),
}


@pytest.mark.parametrize("name", list(HEADS))
def test_settings_that_a_log_states(name: str) -> None:
    head, stated = HEADS[name]
    log = parse_log(head + write_log("megatron", WrittenRun(step_s=STEP_S)))
    assert log.settings == stated


def test_variants_of_lines() -> None:
    alcf = (
        "[2024-09-16 22:59:19.287338][INFO][training_log:661] -  iteration=       1/  635782 | "
        "consumed_samples=     768 | elapsed_time_per_iteration_ms=29570.0 | "
        "learning_rate=9.4372e-09 | global_batch_size=768 | lm loss=11.16 | "
        "loss_scale=1.0 | number_of_skipped_iterations=  0 | tokens_per_gpu_per_second_tgs=4432.597 |"
    )
    (step,) = parse_log(alcf).steps
    assert (step.seconds, step.global_batch, step.tokens_per_s_per_device) == (29.57, 768, 4432.597)

    bar = (
        "Epoch 0: : 20%|██| 20/100 [10:48<00:00, reduced_train_loss=0.0172, global_step=99.00, "
        "train_step_timing in s=3.130]"
    )
    (step,) = parse_log(bar).steps
    assert (step.step, step.seconds) == (99, 3.13)

    old = "2024-04-15 12:00:00,123 - root - INFO - step: 1  loss: 10.84  memory:  5.25GiB(5.52%)  wps: 2,345  mfu: 1.23%"
    assert parse_log(old).steps[0].tokens_per_s_per_device == 2345

    pipeline = "steps: 10 loss: 6.5123 iter time (s): 1.234 samples/sec: 51.8"
    assert parse_log(pipeline).steps == (LoggedStep(step=10, seconds=1.234),)


def test_bars_of_evaluations_are_not_steps() -> None:
    text = write_log("hf-trainer", WrittenRun(step_s=STEP_S))
    assert len(parse_log(text + "\r 50%|█████     | 3/6 [00:01<00:01,  2.00it/s]\n").steps) == len(
        STEP_S
    )


def test_megatron_deepspeed_is_read_by_the_lines_of_megatron() -> None:
    run = WrittenRun(step_s=STEP_S)
    log = parse_log(write_log("deepspeed", run) + write_log("megatron", run))
    assert log.format == "megatron"


def test_deepspeed_steps_are_timed_from_stamp_to_stamp() -> None:
    """The rate that DeepSpeed prints leaves out what passes between the passes."""
    lines = [
        f"[2024-03-07 15:27:{2 + 5 * n:02d},500] [INFO] [timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, "
        "RunningAvgSamplesPerSec=16.0, CurrSamplesPerSec=16.0, MemAllocated=6.01GB, MaxMemAllocated=19.52GB"
        for n in range(1, 8)
    ]
    times = [step.seconds_of(1.0, 8, 64) for step in parse_log("\n".join(lines)).steps]
    assert times == pytest.approx([4.0] + [5.0] * 6)


def test_a_progress_bar_is_timed_by_its_clock() -> None:
    """Its rate is a moving mean, in which a stall of one step lengthens many."""
    step_s = [3.0] * 120
    step_s[59] += 30.0
    text = write_log("hf-trainer", WrittenRun(step_s=step_s))
    smeared = text.replace("3.00s/it", "9.00s/it")
    log = parse_log(smeared)
    times = np.array([step.seconds for step in log.steps], float)
    assert np.median(times) == pytest.approx(3.0, rel=0.05)
    assert times.max() > 6.0
    covered = np.diff([step.step for step in log.steps])
    assert (times[1:] * covered).sum() == pytest.approx(sum(step_s[log.steps[0].step :]), rel=0.06)


# ---- lines of other versions, units and front ends ----

LINES = {
    "Megatron-DeepSpeed of BLOOM": (
        " iteration       10/      50 | consumed samples:         1280 | elapsed time per iteration (s): 4.15 | "
        "global batch size:   128 | lm loss: 1.2E+01 | samples per second: 30.811 | "
        "TFLOPs: 152.34 |",
        LoggedStep(step=10, seconds=4.15, tflops_per_device=152.34, global_batch=128),
    ),
    "Megatron-Bridge without iterations": (
        "Step Time : 6.51s GPU utilization: 512.1MODEL_TFLOP/s/GPU",
        LoggedStep(step=1, seconds=6.51, tflops_per_device=512.1),
    ),
    "torchtitan in the thousands": (
        "[titan] INFO - step: 1,000  loss:  7.1234  memory: 61.52GiB(77.65%)  tps: 123  tflops: 1,310.52  mfu: 31.40%",
        LoggedStep(step=1000, tokens_per_s_per_device=123.0, tflops_per_device=1310.52),
    ),
    "nanotron of 2025": (
        "[INFO|DP=0|PP=1|TP=0|ip-26-0-161-78]: iteration: 12 / 30000 | consumed_tokens: 12.6M | time_per_iteration_ms: "
        "2.5K | tokens_per_sec: 418K | tokens_per_sec_per_gpu: 6.53K | global_batch_size: 256 | lm_loss: 9.61 | ",
        LoggedStep(step=12, seconds=2.5, tokens_per_s_per_device=6530.0, global_batch=256),
    ),
    "DeepSpeed with an exponent": (
        "[INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=0.09, "
        "CurrSamplesPerSec=9.1e-02, MemAllocated=6.01GB, MaxMemAllocated=19.52GB",
        LoggedStep(step=10, samples_per_s=0.091),
    ),
    "DeepSpeed of 2022": (
        "[INFO] [timer.py:198:stop] 0/40, RunningAvgSamplesPerSec=13.12, CurrSamplesPerSec=13.01, MemAllocated=6.01GB",
        LoggedStep(step=40, samples_per_s=13.01),
    ),
    "DeepSpeed of 2021": (
        "[INFO] [timer.py:157:stop] 0/40, SamplesPerSec=13.1",
        LoggedStep(step=40, samples_per_s=13.1),
    ),
    "a bar of more than a day": (
        " 50%|#####     | 5000/10000 [1 day, 2:03:04<1 day, 2:03:04, 18.7s/it]",
        LoggedStep(step=5000, seconds=18.7, clock_s=93784.0),
    ),
    "MS-Swift": (
        "{'loss': 1.234, 'learning_rate': 2e-05, 'memory(GiB)': 61.52, 'train_speed(s/it)': 6.19, "
        "'global_step/max_steps': '10/1000', 'percentage': '1.00%', 'elapsed_time': '1m 2s', 'remaining_time': '1h'}",
        LoggedStep(step=10, seconds=6.19, clock_s=62.0),
    ),
    "MaxText of 2023": (
        "completed step: 3, seconds: 4.567, TFLOP/s: 210.130, loss: 9.123",
        LoggedStep(step=4, seconds=4.567, tflops_per_device=210.13),
    ),
    "llm-foundry's bar": (
        "train          Epoch   0:    1%|#          | 11/1000 [01:08<1:42:10,  6.19s/ba, loss/train/total=9.1]",
        LoggedStep(step=11, seconds=6.19, clock_s=68.0),
    ),
    "llama2.c": (
        "490 | loss 5.7543 | lr 4.900000e-05 | 8060.78ms | mfu 12.21%",
        LoggedStep(step=491, seconds=8.06078),
    ),
    "nanoGPT with other losses": (
        "iter 20: loss 5.4983, mae 0.1234, time: 135.10ms, mfu: 45.10%, eta: 1.20h",
        LoggedStep(step=21, seconds=0.1351),
    ),
    "llm.c in PyTorch": (
        "step    1/10 | train loss 4.367631 | norm 15.2045 | lr 1.00e-04 | (35.20 ms | 7268 tok/s)",
        LoggedStep(step=1, seconds=0.0352),
    ),
    "fairseq of 2019": (
        "| epoch 001:    450 / 1891 loss=11.521, nll_loss=10.881, ppl=1886.05, wps=50000, ups=0.5, wpb=100000, "
        "bsz=5325, num_updates=445, lr=8.90889e-05, gnorm=1.543, clip=0%, loss_scale=2.000, wall=882, train_wall=756",
        LoggedStep(step=445, seconds=2.0, clock_s=882.0),
    ),
    "fairseq as JSON": (
        '{"epoch": 27, "update": 26.267, "loss": "8.206", "wps": "1200.0", "ups": "1.62", "wpb": "600.0", '
        '"bsz": "46.4", "num_updates": "33700", "lr": "0.00017", "gnorm": "1.833", "train_wall": "61", '
        '"wall": "30542"}',
        LoggedStep(step=33700, seconds=0.5, clock_s=30542.0),
    ),
    "PaddleNLP of several steps": (
        "[2022-08-31 16:19:16,008] [    INFO] - loss: 3.25806541, learning_rate: 2.999e-05, global_step: 10, "
        "interval_runtime: 85.2, interval_samples_per_second: 30.05, interval_steps_per_second: 0.1174, epoch: 0.02",
        LoggedStep(step=10, seconds=8.52, clock_s=715277956.008),
    ),
    "levanter after a day": (
        "Progress on:train 91.2kit/100.0kit rate:1.3s/it remaining:1:57:15 elapsed:1 day, 9:15:08 postfix:loss=7.1",
        LoggedStep(step=91200, seconds=1.3, clock_s=119708.0),
    ),
}


@pytest.mark.parametrize("name", list(LINES))
def test_lines_of_other_versions_and_units(name: str) -> None:
    line, step = LINES[name]
    assert parse_log(line).steps == (step,)


def test_dictionaries_are_timed_by_what_elapsed_between_them() -> None:
    """LLaMA-Factory's `trainer_log.jsonl` gives no rate; a restart begins its clock anew."""
    lines = [
        f'{{"current_steps": {step}, "total_steps": 1000, "loss": 1.2, "elapsed_time": "0:{minute:02d}:00", '
        '"remaining_time": "1:42:10", "total_tokens": 1310720}'
        for step, minute in ((10, 1), (20, 2), (30, 3), (20, 1), (30, 2), (40, 3), (50, 4), (60, 5))
    ]
    log = parse_log("\n".join(lines))
    assert log.format == "hf-trainer"
    assert {step.seconds for step in log.steps if step.seconds is not None} == {6.0}
    assert log.count("restart") == 1


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("spoil", ["carriage returns", "colours", "other output between the lines"])
def test_what_terminals_and_libraries_do_to_a_log(form: str, spoil: str) -> None:
    run = WrittenRun(step_s=STEP_S)
    text = write_log(form, run)
    if spoil == "carriage returns":
        text = text.replace("\r", "").replace("\n", "\r\n")
    elif spoil == "colours":
        text = "".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in text.splitlines())
    else:
        noise = "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\nW0101 12:00:00 torch/x.py:795] step: 3 / 7\n"
        text = "".join(f"{line}\n{noise}" for line in text.splitlines())
    assert seconds(parse_log(text), run) == pytest.approx(STEP_S, rel=3e-3)


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if form not in ("composer", "megatron-bridge", "olmo-core")]
)
def test_ranks_that_write_the_same_steps_at_other_times_are_one_run(form: str) -> None:
    """The second rank is ahead in one half of the run and behind in the other; then both are
    restarted."""
    run = WrittenRun(step_s=STEP_S)
    plain = [line for line in write_log(form, run).replace("\r", "").splitlines() if line]
    per_step = len(plain) // len(STEP_S)
    # Megatron-LM writes its memory before the first step.
    head = len(plain) - per_step * len(STEP_S)
    steps = [plain[i : i + per_step] for i in range(head, len(plain), per_step)]
    lines: list[str] = []
    for _ in range(2):
        for i in range(len(STEP_S)):
            ahead = min(i + 2, len(STEP_S) - 1) if i < 3 else i - 2
            lines += [f"[default0]:{line}" for line in steps[i]]
            lines += [f"[default1]:{line}" for line in steps[ahead]]
    log = parse_log("\n".join(lines))
    assert seconds(log, run) == pytest.approx(STEP_S * 2, rel=3e-3)
    assert log.count("restart") == 1


def test_a_run_that_goes_on_elsewhere_is_read_on() -> None:
    run = WrittenRun(step_s=STEP_S)
    lines = write_log("maxtext", run).splitlines()
    text = "\n".join(
        [*(f"node3 | {line}" for line in lines), *(f"node5 | {line}" for line in lines[2:])]
    )
    log = parse_log(text)
    assert seconds(log, run) == pytest.approx(STEP_S + STEP_S[2:])
    assert log.count("restart") == 1


def test_the_trainer_without_its_bar_is_told_how_to_log_times() -> None:
    text = "{'loss': 1.2, 'learning_rate': 2e-05, 'epoch': 0.5}\n{'train_runtime': 6190.1, 'train_loss': 1.1}\n"
    with pytest.raises(TableError, match="disable_tqdm"):
        parse_log(text)


@pytest.mark.parametrize(
    "text", ["hello\nworld\n", "iteration 3 of the plan\n", "step: 1 loss: 3\n"]
)
def test_a_file_without_steps_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(text)
    with pytest.raises(TableError, match="no line about a training step"):
        read_log(tmp_path / "train.log")


def test_a_damaged_character_costs_nothing(tmp_path: Path) -> None:
    run = WrittenRun(step_s=STEP_S)
    (tmp_path / "train.log").write_bytes(b"\xff\xfe broken\n" + write_log("maxtext", run).encode())
    assert seconds(read_log(tmp_path / "train.log"), run) == pytest.approx(STEP_S)


def test_reports_of_the_straggler_detector_are_read() -> None:
    run = WrittenRun(
        step_s=[6.5] * 30,
        stragglers={"Rtt": (1900.0, 2280.0), "DRtt": (14.0, 35.0), "Clk": (1650.0, 1980.0)},
    )
    log = parse_log(write_log("megatron", run))
    assert log.timers["forward"].least_s == pytest.approx(1.9)
    assert log.timers["forward"].most_s == pytest.approx(2.28)
    assert log.timers["data"].most_s == pytest.approx(0.035)
    assert log.clocks is not None
    assert (log.clocks.least_hz, log.clocks.most_hz) == (1650e6, 1980e6)
    assert parse_log(write_log("megatron", replace(run, stragglers={}))).clocks is None


def test_logs_of_olmo_before_its_core() -> None:
    """The first block has no rate; the clock stands in the heading."""
    text = """
        [2024-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step=1/739328]
            train/CrossEntropyLoss=11.25
            throughput/total_tokens=4,194,304
        [2024-04-17 09:42:38] INFO     [olmo.train:816, rank=0] [step=2/739328]
            throughput/device/tokens_per_second=45,538
        [2024-04-17 09:42:50] INFO     [olmo.train:816, rank=0] [step=3/739328]
            throughput/device/tokens_per_second=45,368
    """
    steps = parse_log(text).steps
    assert [(step.step, step.tokens_per_s_per_device) for step in steps] == [
        (2, 45538.0),
        (3, 45368.0),
    ]
    assert steps[0].clock_s is not None
    assert steps[1].clock_s == steps[0].clock_s + 12.0
