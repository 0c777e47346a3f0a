"""Sick runs drawn at random: a job, a fault, how severe it is, and what the framework's log
prints."""

from dataclasses import replace

import numpy as np
from simulated_runs import STEPS, SimulatedRun, batches_of, job, steps_s

LOGS = {
    "mixtral": "megatron",
    "mixtral across nodes": "megatron-bridge",
    "gpt 13b": "megatron",
    "llama 70b": "megatron",
    "deepspeed 13b": "deepspeed",
    "deepspeed 7b": "deepspeed",
    "xtuner 7b": "xtuner",
    "nemo 8b": "nemo",
    "torchtitan 8b": "torchtitan",
    "nanotron": "nanotron",
    "maxtext": "maxtext",
    "composer": "composer",
    "hf 8b": "hf-trainer",
    "levanter 8b": "levanter",
}
"""The framework that writes the log of each job."""
GROWING = ("megatron", "megatron-bridge", "nemo")
"""Frameworks that print the batch of each step."""
FREQUENCIES = {
    "slow_inter_node_link": 1.0,
    "slow_rank": 1.0,
    "host_bound": 0.8,
    "low_clocks": 0.3,
    "data_loading": 0.4,
}
"""How often each fault is drawn, relative to the others: as often as the check takes it to be."""
LEAST_EFFECT = 0.1
"""Share of the step that a fault has to cost: smaller ones no log shows."""


def drawn_runs(count: int, seed: int) -> list[SimulatedRun]:
    """Draw sick runs whose faults cost at least a tenth of the step."""
    rng = np.random.default_rng(seed)
    runs: list[SimulatedRun] = []
    while len(runs) < count:
        run = _drawn(rng)
        problem, _ = job(run.job)
        batches = batches_of(replace(run, first_batches=()), problem.job.global_batch)
        healthy = replace(run, settings=(), loader_s=0.0, begins_at=1)
        if (
            steps_s(replace(run, begins_at=1), batches)[-1]
            > (1 + LEAST_EFFECT) * steps_s(healthy, batches)[-1]
        ):
            runs.append(run)
    return runs


def _drawn(rng: np.random.Generator) -> SimulatedRun:
    name = str(rng.choice(list(LOGS)))
    form = LOGS[name]
    problem, layout = job(name)
    batch = problem.job.global_batch
    shares = np.array(list(FREQUENCIES.values()))
    cause = str(rng.choice(list(FREQUENCIES), p=shares / shares.sum()))
    settings: tuple[str, ...] = ()
    loader_s = 0.0
    if cause == "slow_inter_node_link":
        settings = (f"inter_node_bandwidth={rng.choice([0.5, 0.25, 0.125, 0.06])}x",)
    elif cause == "slow_rank":
        settings = (
            f"slow_rank={rng.integers(layout.pp)}",
            f"slow_factor={rng.uniform(1.15, 1.8):.2f}x",
        )
    elif cause == "host_bound":
        settings = (f"host_op_s={rng.uniform(1.5, 4.0):.2f}x",)
    elif cause == "low_clocks":
        rate = rng.uniform(0.6, 0.85)
        settings = (f"compute_rate={rate:.2f}x", f"power_limit={rate:.2f}x")
    else:
        loader_s = float(
            steps_s(SimulatedRun(form=form, job=name), [batch])[0] * rng.uniform(0.15, 0.6)
        )

    # Timers and a growing batch are what some logs have beside the step time.
    has_timers = form in ("megatron", "megatron-bridge", "deepspeed") and rng.random() < 0.5
    grows = form in GROWING and not has_timers and rng.random() < 0.5
    begins_later = not has_timers and not grows and rng.random() < 0.3
    loads_by_sequence = bool(rng.random() < 0.5)
    barriers = bool(rng.random() < 0.5)
    begins_at = 1
    if begins_later and not loader_s:
        begins_at = int(rng.integers(STEPS // 3, 2 * STEPS // 3))
    return SimulatedRun(
        form=form,
        job=name,
        settings=settings,
        loader_s=loader_s,
        loads_by_sequence=loads_by_sequence,
        timers=bool(has_timers),
        barriers=barriers,
        first_batches=(batch // 4, batch // 2) if grows else (),
        begins_at=begins_at,
        site_spread=0.08,
        cause=cause,
    )


def has_evidence(run: SimulatedRun) -> bool:
    """Whether the log holds more on the fault than how long steps are."""
    return (
        run.timers
        or bool(run.first_batches)
        or (run.loader_s > 0 and run.form in ("deepspeed", "xtuner"))
    )
