"""Runs of every kind, drawn at random from jobs that no rule of the check was written with.

A kind is drawn first, then one of the frameworks whose logs can hold it. Faults that a log only
shows by its times cost at least a quarter of the step. Logs of Megatron-LM's family with such a
fault have timers, a report of the straggler detector or a growing batch, and half of DeepSpeed's
have timers; other frameworks print nothing beside the step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from simulated_runs import STEPS, SimulatedRun, job, steps_s

FORMATS: Final = {
    "megatron-lm 20b": "megatron",
    "megatron-core 15b": "megatron",
    "bridge 72b": "megatron-bridge",
    "nemo 12b": "nemo",
    "deepspeed gemma": "deepspeed",
    "torchtitan 13b": "torchtitan",
    "nanotron 3b": "nanotron",
    "composer 30b": "composer",
    "maxtext llama": "maxtext",
    "fsdp olmo": "hf-trainer",
    "levanter 7b": "levanter",
    "xtuner 20b": "xtuner",
}
MEGATRON: Final = ("megatron-lm 20b", "megatron-core 15b", "bridge 72b")
HIDDEN: Final = ("slow_inter_node_link", "slow_rank", "host_bound", "low_clocks", "data_loading")
LEAST_EFFECT: Final = 0.25


def unseen_runs(count: int, seed: int) -> list[SimulatedRun]:
    """Draw runs, each kind as often as any other."""
    rng = np.random.default_rng(seed)
    runs: list[SimulatedRun] = []
    while len(runs) < count:
        kind = str(rng.choice(list(KINDS)))
        run = KINDS[kind](rng)
        while kind in HIDDEN and _effect(run) <= LEAST_EFFECT:
            run = KINDS[kind](rng)
        runs.append(run)
    return runs


def _effect(run: SimulatedRun) -> float:
    """Share by which the fault lengthens the step."""
    problem, _ = job(run.job)
    batch = [problem.job.global_batch]
    always = replace(run, begins_at=1, first_batches=())
    healthy = replace(always, settings=(), loader_s=0.0)
    return float(steps_s(always, batch)[0] / steps_s(healthy, batch)[0] - 1)


def _plain(
    rng: np.random.Generator, names: tuple[str, ...] = tuple(FORMATS), cause: str = ""
) -> SimulatedRun:
    name = str(rng.choice(names))
    return SimulatedRun(form=FORMATS[name], job=name, site_spread=0.08, cause=cause)


def _machine(cause: str, settings: Callable[[np.random.Generator, int], tuple[str, ...]]):
    def drawn(rng: np.random.Generator) -> SimulatedRun:
        run = _with_evidence(rng, _plain(rng, cause=cause))
        _, layout = job(run.job)
        return replace(run, settings=settings(rng, layout.pp))

    return drawn


def _clocks(share: float) -> tuple[str, ...]:
    """Clocks and power limit lowered to a share."""
    return (f"compute_rate={share:.2f}x", f"power_limit={share:.2f}x")


def _data_loading(rng: np.random.Generator) -> SimulatedRun:
    run = _with_evidence(rng, _plain(rng, cause="data_loading"))
    problem, _ = job(run.job)
    step_s = steps_s(SimulatedRun(form=run.form, job=run.job), [problem.job.global_batch])[0]
    return replace(
        run,
        begins_at=1,
        loader_s=float(step_s * rng.uniform(0.26, 0.6)),
        loads_by_sequence=bool(rng.random() < 0.5),
    )


def _with_evidence(rng: np.random.Generator, run: SimulatedRun) -> SimulatedRun:
    """Add to a run the evidence beside step times that the log of its hidden fault holds."""
    problem, _ = job(run.job)
    batch = problem.job.global_batch
    if run.job in MEGATRON:
        evidence = str(rng.choice(["timers", "stragglers", "batch"]))
        return replace(
            run,
            timers=evidence == "timers",
            barriers=bool(rng.random() < 0.5),
            stragglers=evidence == "stragglers",
            clock_shows=bool(rng.random() < 0.5),
            first_batches=(batch // 4, batch // 2) if evidence == "batch" else (),
        )
    if run.job == "nemo 12b":
        return replace(run, first_batches=(batch // 4, batch // 2))
    if run.form == "deepspeed" and rng.random() < 0.5:
        return replace(run, timers=True)
    begins_at = int(rng.integers(STEPS // 3, 2 * STEPS // 3)) if rng.random() < 0.3 else 1
    return replace(run, begins_at=begins_at)


def _options(cause: str, **options: object):
    def drawn(rng: np.random.Generator) -> SimulatedRun:
        return replace(_plain(rng, MEGATRON, cause), options=options, logs_options=True)

    return drawn


def _stalls(rng: np.random.Generator, cause: str, every: int | None) -> SimulatedRun:
    run = _plain(rng, cause=cause)
    problem, _ = job(run.job)
    step_s = float(steps_s(SimulatedRun(form=run.form, job=run.job), [problem.job.global_batch])[0])
    steps = (
        range(every, STEPS, every) if every else rng.choice(np.arange(20, STEPS), 8, replace=False)
    )
    pauses = {int(step): step_s * float(rng.uniform(2.0, 6.0)) for step in steps}
    if cause == "checkpoints":
        return replace(run, saves=pauses)
    if cause == "evaluations":
        return replace(run, evaluations=pauses)
    return replace(run, stall_s=pauses)


def _contradiction(rng: np.random.Generator) -> SimulatedRun:
    run = _plain(rng, MEGATRON)
    problem, _ = job(run.job)
    states = {"global_batch_size": problem.job.global_batch * 2}
    return replace(run, states=states, contradiction="global_batch")


KINDS: Final[dict[str, Callable[[np.random.Generator], SimulatedRun]]] = {
    "slow_inter_node_link": _machine(
        "slow_inter_node_link",
        lambda rng, pp: (f"inter_node_bandwidth={rng.choice([0.5, 0.25, 0.125, 0.06])}x",),
    ),
    "slow_rank": _machine(
        "slow_rank",
        lambda rng, pp: (
            f"slow_rank={rng.integers(pp)}",
            f"slow_factor={rng.uniform(1.25, 1.8):.2f}x",
        ),
    ),
    "host_bound": _machine(
        "host_bound", lambda rng, pp: (f"host_op_s={rng.uniform(2.0, 5.0):.2f}x",)
    ),
    "low_clocks": _machine("low_clocks", lambda rng, pp: _clocks(rng.uniform(0.55, 0.79))),
    "data_loading": _data_loading,
    "overlap_off": _options("overlap_off", overlap_grad_reduce=False),
    "full_recompute": _options("full_recompute", recompute="full"),
    "checkpoints": lambda rng: _stalls(rng, "checkpoints", int(rng.choice([20, 30, 40]))),
    "evaluations": lambda rng: _stalls(rng, "evaluations", int(rng.choice([20, 30, 40]))),
    "periodic_stalls": lambda rng: _stalls(rng, "periodic_stalls", int(rng.choice([15, 25, 35]))),
    "irregular_stalls": lambda rng: _stalls(rng, "irregular_stalls", None),
    "skipped_steps": lambda rng: replace(
        _plain(rng, (*MEGATRON, "deepspeed gemma"), "skipped_steps"),
        skipped=tuple(range(int(rng.integers(2, 9)), STEPS, int(rng.integers(7, 20)))),
    ),
    "slows_down": lambda rng: replace(
        _plain(rng, cause="slows_down"), slower_later=float(rng.uniform(1.1, 1.5))
    ),
    "another batch": _contradiction,
    "healthy": _plain,
}
