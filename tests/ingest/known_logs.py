"""What is read from the logs of every format, kept in `known_logs.csv`.

Each format's log of a plain run is the base; its variants log checkpoints, evaluations, timers,
stragglers, overflows, growing batches or settings too. A change that is meant to move what is read
is followed by

    PYTHONPATH=tests:tests/ingest python tests/ingest/known_logs.py
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from stored_figures import StoredCase, write_cases
from written_logs import FORMATS, WrittenRun, write_log

from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import LoggedStep, TrainingLog, parse_log

TABLE = Path(__file__).with_suffix(".csv")
PLAIN = WrittenRun(step_s=[41.5, 6.51, 6.49, 6.57, 6.52, 6.48, 7.25, 6.53, 6.5, 6.44, 6.6, 6.51])
VARIANTS: dict[str, dict[str, Any]] = {
    "checkpoints": {"checkpoints": (3, 8), "pause_after_s": {3: 12.5, 8: 31.0}},
    "evaluations": {"evaluations": (4,), "pause_after_s": {4: 20.0}},
    "skipped": {"skipped": (2, 3, 9)},
    "timers": {
        "timers_ms": {
            "forward-backward": (4000.0, 4200.0),
            "forward-compute": (1400.0, 1500.0),
            "backward-compute": (2600.0, 2700.0),
            "batch-generator": (20.0, 350.0),
            "all-grads-sync": (300.0, 450.0),
            "params-all-gather": (100.0, 120.0),
            "optimizer": (80.0, 95.0),
        }
    },
    "stragglers": {
        "stragglers": {"Rtt": (512.0, 640.0), "Clk": (1400.0, 1755.0), "DRtt": (60.0, 90.0)}
    },
    "loader": {"loader_s": 0.75},
    "growing batch": {"batches": (128, 128, 256, 256, 256, 384, 384, 384, 512, 512, 512, 512)},
    "settings": {
        "settings": {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "world_size": 64,
            "global_batch_size": 256,
            "micro_batch_size": 2,
            "seq_length": 2048,
            "use_distributed_optimizer": True,
            "recompute_granularity": "full",
            "bf16": True,
        }
    },
    "fast": {"step_s": [3.0, 0.42, 0.43, 0.41, 0.42, 0.44, 0.42], "devices": 8, "global_batch": 16},
    "slow": {"step_s": [300.0, 123.0, 124.5, 122.0, 125.0], "reserved_gib": 12.5},
}
SPANS: dict[str, dict[str, Any]] = {
    "five spans": {"step_s": [6.5] * 20},
    "six spans": {"step_s": [6.5] * 24},
    "many spans": {"step_s": [2.3] * 90 + [9.1] + [2.3] * 30},
    "spans of one step": {"step_s": [25.0] * 9},
}
"""Runs that progress bars are timed by their clock in, over spans of at least 20 s, if there are at
least six."""
TIMED_BY_SPANS = ("hf-trainer", "levanter")
LINES = {
    "seconds of BLOOM": "iteration 10/ 50 | elapsed time per iteration (s): 4.15 |",
    "milliseconds": "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 |",
    "rate of BLOOM": "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 | TFLOPs: 152.34 |",
    "rate of Megatron-LM": (
        "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 | throughput per GPU (TFLOP/s/GPU): 410.5 |"
    ),
    "rate of nanotron": (
        "iteration: 12 / 30 | consumed_tokens: 12.6M | elapsed_time_per_iteration_ms: 2.5K | "
        "model_tflops_per_gpu: 412.3 |"
    ),
    "rate of older nanotron": (
        "iteration: 12 / 30 | consumed_tokens: 12.6M | time_per_iteration_ms: 2.5K | tflops_per_gpu: 401.3 |"
    ),
    "tokens of nanotron": (
        "iteration: 12 / 30 | consumed_tokens: 12.6M | time_per_iteration_ms: 2.5K | tokens_per_sec_per_gpu: 6.53K |"
    ),
    "tokens of ALCF": (
        "iteration= 1/ 63 | elapsed_time_per_iteration_ms=2950.0 | tokens_per_gpu_per_second_tgs=4432.5 |"
    ),
    "loss scale": "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 | loss scale: 65536.0 |",
    "skipped": "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 | number of skipped iterations: 3 |",
    "batch": "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 | global batch size: 768 |",
    "shortened batch": (
        "iteration: 12 / 30 | consumed_tokens: 12.6M | time_per_iteration_ms: 2.5K | global_batch_size: 1.02K |"
    ),
    "stamp with milliseconds": "2024-09-16 22:59:19,287 step: 7  loss: 7.1  tps: 123",
    "stamp of a European date": "13/05/2024 22:59:19 step: 7  loss: 7.1  tps: 123",
    "one batch a second": "[batch=10/99]:\n Train throughput/batches_per_sec: 1.0\n Train time/batch: 9\n",
    "slow batches alone": "[batch=10/99]:\n Train throughput/batches_per_sec: 0.25\n",
    "slow batches and samples": (
        "[batch=10/99]:\n Train throughput/batches_per_sec: 0.25\n Train throughput/samples_per_sec: 63.0\n"
    ),
    "a batch a second and samples": (
        "[batch=10/99]:\n Train throughput/batches_per_sec: 1.0\n Train throughput/samples_per_sec: 63.0\n"
    ),
    "slow batches and tokens": (
        "[batch=10/99]:\n Train throughput/batches_per_sec: 0.25\n Train throughput/device/tokens_per_sec: 5012.0\n"
    ),
    "hours of Composer": "[batch=10/99]:\n Train throughput/batches_per_sec: 2.5\n Train wall_clock/total: 1.25\n",
    "stamp beside hours": (
        "2024-09-16 22:59:19 [batch=10/99]:\n Train throughput/batches_per_sec: 2.5\n Train wall_clock/total: 1.25\n"
    ),
    "metrics before the first heading": (
        " Train throughput/samples_per_sec: 99.0\n Train time/batch: 1\n"
        "[batch=2/99]:\n Train throughput/samples_per_sec: 63.0\n"
    ),
    "an evaluation of a dictionary": (
        "{'eval_loss': 1.2, 'global_step/max_steps': '10/99', 'elapsed_time': '1m 2s'}\n"
        "{'loss': 1.2, 'global_step/max_steps': '20/99', 'elapsed_time': '1m 32s'}\n"
        "{'train_runtime': 92.0, 'global_step/max_steps': '20/99', 'elapsed_time': '1m 32s'}\n"
    ),
    "a dictionary's speed in steps": (
        "{'train_speed(iter/s)': 2.5, 'global_step/max_steps': '10/99', 'elapsed_time': '1h 1m 2s'}"
    ),
    "a dictionary without speed": (
        "{'train_speed(iter/s)': 0.0, 'global_step/max_steps': '10/99', 'elapsed_time': '2 days, 1:01:02'}"
    ),
    "a dictionary's clock set back": (
        "{'global_step/max_steps': '10/99', 'elapsed_time': '10m 2s'}\n"
        "{'global_step/max_steps': '20/99', 'elapsed_time': '1m 2s'}\n"
        "{'global_step/max_steps': '30/99', 'elapsed_time': '2m 2s'}\n"
        "{'global_step/max_steps': '20/99', 'elapsed_time': '3m 2s'}\n"
    ),
    "stamps of DeepSpeed after a restart": "".join(
        f"[2024-03-07 15:{minute:02d}:00,500] [INFO] epoch=0/micro_step={step}/global_step={step}, SamplesPerSec=16.0\n"
        for minute, step in ((1, 10), (2, 20), (3, 10), (4, 20), (2, 30), (3, 40))
    ),
    "DeepSpeed without a rate": (
        "epoch=0/micro_step=3/global_step=3, SamplesPerSec=0.0\nsteps: 4 loss: 1.2 iter time (s): 1.2"
    ),
    "checkpoints that say how long": (
        "step: 7  loss: 7.1  tps: 123\nFinished saving the checkpoint in 12.5 seconds.\n"
        "step: 8  loss: 7.1  tps: 123\n    save-checkpoint ......: (1250.0, 2500.0)\n"
        "step: 9  loss: 7.1  tps: 123\n    save-checkpoint ......: 3500.0\n"
    ),
    "peaks of several lines": (
        "step: 7  loss: 7.1  memory: 50.0GiB(5%)  tps: 123\nmax allocated: 900.0\n"
        "step: 8  loss: 7.1  memory: 60.0GiB(5%)  tps: 123\nmax allocated: 800.0\n"
    ),
    "half of the straggler detector": (
        "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 |\n"
        "MnRtt/Rnk: 512.0ms/8 | MnClk/Rnk: 1400.0MHz/8 | MxDRtt/Rnk: 90.0ms/0\n"
    ),
    "a timer of one number": (
        "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 |\n    grads-reduce-scatter ......: 42.0\n"
    ),
    "timers of DeepSpeed": (
        "global_step=7, SamplesPerSec=16.0\n"
        "time (ms) | fwd: 3865.5 | bwd: 11249.5 | bwd_inner: 10520.5 | bwd_allreduce: 729.5 | step: 888.5\n"
    ),
    "steps of Megatron-Bridge alone": "Step Time : 6.5s GPU utilization: 512.1MODEL_TFLOP/s/GPU\n"
    * 3,
    "peak in bytes": "step: 7  loss: 7.1  tps: 123\npeak_memory_usage: 66000000000\n",
    "a dictionary of single steps": (
        "{'global_step/max_steps': '1/99', 'elapsed_time': '5s'}\n"
        "{'global_step/max_steps': '2/99', 'elapsed_time': '6s'}\n"
    ),
    "settings of torchtitan": (
        "Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [2, 8, 4]\nstep: 7  loss: 7.1  tps: 123\n"
        "local batch size 8, global batch size 64, gradient accumulation steps 1, sequence length 8192,\n"
    ),
    "settings of nanotron": (
        "ParallelismArgs(dp=2,\n pp=4,\n tp=8,\n"
        "iteration: 12 / 30 | consumed_tokens: 12.6M | time_per_iteration_ms: 2.5K |"
    ),
    "flags": (
        "  sequence_parallel ........ True\n  overlap_grad_reduce ........ False\n  tp_comm_overlap ........ maybe\n"
        "  micro_batch_size ........ 1,024\n  global_batch_size ........ auto\n"
        "iteration 10/ 50 | elapsed time per iteration (ms): 4150.0 |"
    ),
    "two ranks": "".join(
        f"[rank{rank}]: step: {step}  loss: 7.1  tps: {rate}\n"
        for rank, step, rate in (
            (0, 1, 11),
            (0, 2, 12),
            (1, 1, 13),
            (0, 3, 14),
            (1, 2, 15),
            (1, 3, 16),
            (1, 4, 17),
        )
    ),
}
LINES |= {
    f"rate of {rate}": (
        f"iteration: 2 / 30 | consumed_tokens: 1 | time_per_iteration_ms: 2.5 | tokens_per_sec_per_gpu: {rate} |"
    )
    for rate in ("1.5", "2.5K", "3.5M", "4.5G", "5.5B", "6.5T", "7.5P", "1,234.5")
}
"""Logs of a few lines, each with a quantity that formats above do not have, or in another unit."""


def figures(log: TrainingLog, run: WrittenRun) -> dict[str, float]:
    """Figures of a log: each field of its first and last step and their sum, its events, settings,
    timers and peaks."""
    figures: dict[str, float] = {
        "steps": float(len(log.steps)),
        "restarts": float(log.count("restart")),
    }
    for field in fields(LoggedStep):
        values = [getattr(step, field.name) for step in log.steps]
        known = [float(value) for value in values if value is not None]
        if known:
            figures |= {f"{field.name}.known": float(len(known)), f"{field.name}.sum": sum(known)}
            figures |= {f"{field.name}.first": known[0], f"{field.name}.last": known[-1]}
    # Beside the seconds since an origin, fractions of one would not show.
    figures["clock.of_day"] = sum(
        step.clock_s % 86400 for step in log.steps if step.clock_s is not None
    )
    tokens = run.global_batch * run.seq_len
    seconds = [step.seconds_of(tokens, run.devices, run.global_batch) for step in log.steps]
    figures["seconds_of"] = sum(value for value in seconds if value is not None)
    for event in log.events:
        for name, value in (
            ("number", 1.0),
            ("after", event.after_step),
            ("seconds", event.seconds or 0.0),
        ):
            figures[f"{event.kind}.{name}"] = figures.get(f"{event.kind}.{name}", 0.0) + value
    for name, value in log.settings.items():
        figures[f"setting.{name}={value}".replace(" ", "")] = 1.0
    for name, timer in log.timers.items():
        figures |= {f"timer.{name}.least": timer.least_s, f"timer.{name}.most": timer.most_s}
    if log.clocks is not None:
        figures |= {"clock.least": log.clocks.least_hz, "clock.most": log.clocks.most_hz}
    figures |= {"allocated": log.allocated_bytes or 0.0, "reserved": log.reserved_bytes or 0.0}
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """Readings of every format's log of a plain run, and of its variants."""
    for form in FORMATS:
        variants = VARIANTS | SPANS if form in TIMED_BY_SPANS else VARIANTS
        for name, changes in ({form: {}} | variants).items():
            run = replace(PLAIN, **changes)
            try:
                log = parse_log(write_log(form, run))
            except PerfModelError:
                continue
            yield StoredCase(form, name, figures(log, run))
    for name, text in LINES.items():
        log = parse_log(text)
        yield StoredCase(name, name, figures(log, PLAIN))


if __name__ == "__main__":
    write_cases(TABLE, cases())
