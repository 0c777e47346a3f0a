"""What is read from the logs of every format, kept in `known_logs.csv`.

Each format's log of a plain run is the base; its variants log checkpoints, evaluations, timers, stragglers, overflows,
growing batches or settings too. A change that is meant to move what is read is followed by

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
    "stragglers": {"stragglers": {"Rtt": (512.0, 640.0), "Clk": (1400.0, 1755.0), "DRtt": (60.0, 90.0)}},
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


def figures(log: TrainingLog, run: WrittenRun) -> dict[str, float]:
    """Figures of a log: each field of its first and last step and their sum, its events, settings, timers and peaks."""
    found: dict[str, float] = {"steps": float(len(log.steps))}
    for field in fields(LoggedStep):
        values = [getattr(step, field.name) for step in log.steps]
        known = [float(value) for value in values if value is not None]
        if known:
            found |= {f"{field.name}.known": float(len(known)), f"{field.name}.sum": sum(known)}
            found |= {f"{field.name}.first": known[0], f"{field.name}.last": known[-1]}
    tokens = run.global_batch * run.seq_len
    seconds = [step.seconds_of(tokens, run.devices, run.global_batch) for step in log.steps]
    found["seconds_of"] = sum(value for value in seconds if value is not None)
    for event in log.events:
        for name, value in (("number", 1.0), ("after", event.after_step), ("seconds", event.seconds or 0.0)):
            found[f"{event.kind}.{name}"] = found.get(f"{event.kind}.{name}", 0.0) + value
    for name, value in log.settings.items():
        found[f"setting.{name}={value}".replace(" ", "")] = 1.0
    for name, timer in log.timers.items():
        found |= {f"timer.{name}.least": timer.least_s, f"timer.{name}.most": timer.most_s}
    if log.clocks is not None:
        found |= {"clock.least": log.clocks.least_hz, "clock.most": log.clocks.most_hz}
    found |= {"allocated": log.allocated_bytes or 0.0, "reserved": log.reserved_bytes or 0.0}
    return {name: value for name, value in found.items() if value}


def cases() -> Iterator[StoredCase]:
    """What is read of every format's log of a plain run, and of its variants."""
    for form in FORMATS:
        for name, changes in ({form: {}} | VARIANTS).items():
            run = replace(PLAIN, **changes)
            try:
                log = parse_log(write_log(form, run))
            except PerfModelError:
                continue
            yield StoredCase(form, name, figures(log, run))


if __name__ == "__main__":
    write_cases(TABLE, cases())
