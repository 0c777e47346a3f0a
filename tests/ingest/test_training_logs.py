"""Logs of training runs: every format gives the step times, the memory and the events that were written into it."""

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
    "prefix", ["0: ", "[default7]:", "node3 | ", "2025-03-04T10:00:00.123456789Z ", "[1,0]<stdout>:"]
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


@pytest.mark.parametrize("form", ["megatron", "megatron-bridge", "torchtitan", "nanotron", "composer"])
def test_peak_memory_is_in_bytes(form: str) -> None:
    log = parse_log(write_log(form, WrittenRun(step_s=STEP_S, reserved_gib=61.5)))
    assert log.reserved_bytes == pytest.approx(61.5 * GIB, rel=2e-3)


def test_deepspeed_reports_allocated_memory() -> None:
    log = parse_log(write_log("deepspeed", WrittenRun(step_s=STEP_S, reserved_gib=50.0)))
    assert log.allocated_bytes == pytest.approx(45.0 * GIB)


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
    assert (log.timers["compute"].least_s, log.timers["compute"].most_s) == pytest.approx((6.0, 6.4))
    assert (log.timers["data"].least_s, log.timers["data"].most_s) == pytest.approx((0.005, 0.09))
    assert log.timers["gradient_sync"].most_s == pytest.approx(0.31)


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

    old = (
        "2024-04-15 12:00:00,123 - root - INFO - step: 1  loss: 10.84  memory:  5.25GiB(5.52%)  wps: 2,345  mfu: 1.23%"
    )
    assert parse_log(old).steps[0].tokens_per_s_per_device == 2345

    pipeline = "steps: 10 loss: 6.5123 iter time (s): 1.234 samples/sec: 51.8"
    assert parse_log(pipeline).steps == (LoggedStep(step=10, seconds=1.234),)


def test_bars_of_evaluations_are_not_steps() -> None:
    text = write_log("hf-trainer", WrittenRun(step_s=STEP_S))
    assert len(parse_log(text + "\r 50%|█████     | 3/6 [00:01<00:01,  2.00it/s]\n").steps) == len(STEP_S)


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


@pytest.mark.parametrize("text", ["hello\nworld\n", "iteration 3 of the plan\n", "step: 1 loss: 3\n"])
def test_a_file_without_steps_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(text)
    with pytest.raises(TableError, match="no line about a training step"):
        read_log(tmp_path / "train.log")


def test_a_damaged_character_costs_nothing(tmp_path: Path) -> None:
    run = WrittenRun(step_s=STEP_S)
    (tmp_path / "train.log").write_bytes(b"\xff\xfe broken\n" + write_log("maxtext", run).encode())
    assert seconds(read_log(tmp_path / "train.log"), run) == pytest.approx(STEP_S)
