"""Training runs that are simulated with a fault, and written as the logs of their frameworks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from written_logs import WrittenRun, write_log

import perfmodel as pm
from perfmodel.ingest.logs import parse_log
from perfmodel.planning.health import RunHealth, check_run
from perfmodel.planning.what_if import Scenario, model_in_scenario, step_s
from perfmodel.prediction import explain, step_problem_of
from perfmodel.spec import Layout, Problem

LAUNCH_FILES = Path(__file__).parents[2] / "ingest" / "launch_files"
STEPS = 150


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A job, what is wrong with it, and the framework whose log it writes."""

    form: str
    job: str
    settings: tuple[str, ...] = ()
    """Of the machine, as `perfmodel whatif --set` takes them."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields of the layout that run otherwise than in the script."""
    logs_options: bool = False
    """Whether the log prints the arguments that ran."""
    timers: bool = False
    barriers: bool = False
    """Whether ranks meet before each timer starts, as `--timing-log-level 1` has it: a slow rank's
    time then stands in the passes of all ranks."""
    stragglers: bool = False
    """Whether Megatron-Core's straggler detector reports."""
    clock_shows: bool = True
    """Whether a slow rank is slow because of its clock."""
    loader_s: float = 0.0
    loads_by_sequence: bool = False
    """Whether a smaller batch is loaded in less time."""
    first_batches: Sequence[int] = ()
    """Batches of the first steps, a third of the run together, where the batch grows; the job's own
    follows."""
    begins_at: int = 1
    """Step at which the machine's fault begins."""
    site_spread: float = 0.05
    """Standard deviation of healthy sites of this kind, of which the run's is one."""
    stall_s: Mapping[int, float] = field(default_factory=dict)
    """Longer steps, by number."""
    saves: Mapping[int, float] = field(default_factory=dict)
    """Pauses for checkpoints that the log reports, by step."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    slower_later: float = 1.0
    """How many times as long the last step is as the first."""
    slower_from: int = 0
    """The step at which steps become longer at once; 0: little by little."""
    skipped: Sequence[int] = ()
    spoil: Callable[[str], str] = str
    """What happens to the text of the log."""
    states: Mapping[str, object] = field(default_factory=dict)
    """Arguments at the head of the log."""
    cause: str = ""
    """The cause to be named first; empty for a healthy run."""
    contradiction: str = ""
    """The setting of which log and script state different values."""


def coloured(text: str) -> str:
    return "".join(f"\x1b[32m{line}\x1b[0m\r\n" for line in text.replace("\r", "").splitlines())


def of_two_ranks(text: str) -> str:
    """Lines of a rank, and those of another that is two lines behind."""
    lines = text.replace("\r", "").splitlines()
    mixed = []
    for at, line in enumerate(lines):
        mixed.append(f"[default0]:{line}")
        if at >= 2:
            mixed.append(f"[default7]:{lines[at - 2]}")
    return "\n".join(mixed)


def resumed(text: str) -> str:
    """A run that broke off after two thirds, and went on from a third on another node."""
    lines = text.splitlines()
    third = len(lines) // 3
    return "\n".join(
        [*(f"0: {line}" for line in lines[: 2 * third]), *(f"1: {line}" for line in lines[third:])]
    )


JOBS = {
    "megatron 8b": (
        "llama3-8b",
        "dgx-a100",
        "megatron-core",
        "tp=2,dp=32,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        128,
    ),
    "megatron 70b": (
        "llama3-70b",
        "dgx-h100",
        "megatron-core",
        "tp=8,pp=8,dp=2,zero=1,recompute=full",
        256,
    ),
    "deepspeed 8b": ("llama3-8b", "dgx-h100", "deepspeed", "dp=32,zero=3,recompute=full", 256),
    "hf 8b": ("llama3-8b", "dgx-h100", "generic", "dp=16,zero=3,recompute=full", 64),
    "levanter 8b": "levanter_8b.yaml",
    "nemo": "nemo_llama.yaml",
    "torchtitan": "torchtitan_8b.toml",
    "nanotron": "nanotron_3d.yaml",
    "maxtext": "maxtext_tpu.yml",
    "composer": "llm_foundry_7b.yaml",
    "mixtral": (
        "mixtral-8x7b",
        "dgx-h100",
        "megatron-core",
        "tp=2,pp=4,dp=8,ep=8,sequence_parallel=true,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        256,
    ),
    "mixtral across nodes": (
        "mixtral-8x7b",
        "dgx-h100",
        "megatron-bridge",
        "tp=4,dp=16,ep=8,sequence_parallel=true,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        256,
    ),
    "gpt 13b": ("gpt3-13b", "dgx-a100", "megatron-lm", "tp=4,pp=2,dp=8,micro_batch=2,zero=1", 256),
    "llama 70b": (
        "llama2-70b",
        "dgx-h100",
        "megatron-core",
        "tp=8,pp=4,dp=4,sequence_parallel=true,zero=1,overlap_grad_reduce=true",
        128,
    ),
    "deepspeed 13b": ("llama2-13b", "dgx-a100", "deepspeed", "dp=64,zero=2,recompute=full", 256),
    "deepspeed 7b": ("mistral-7b", "dgx-h100", "deepspeed", "dp=32,zero=1,recompute=full", 128),
    "xtuner 7b": ("qwen2-7b", "dgx-h100", "xtuner", "dp=16,zero=3,recompute=full", 64),
    "xtuner 13b": ("llama2-13b", "dgx-h100", "xtuner", "dp=32,zero=3,recompute=full", 128),
    "nemo 8b": ("llama3-8b", "dgx-h100", "nemo", "tp=2,dp=16,sequence_parallel=true,zero=1", 128),
    "torchtitan 8b": (
        "llama3-8b",
        "dgx-h100",
        "torchtitan",
        "dp=64,zero=2,recompute=selective",
        128,
    ),
    "automodel 7b": ("mistral-7b", "dgx-h100", "nemo-automodel", "dp=16,zero=3,recompute=full", 64),
    # Jobs of `unseen_runs`: models, layouts and clusters that no rule was written with.
    "megatron-lm 20b": (
        "gpt-neox-20b",
        "hgx-h200",
        "megatron-lm",
        "tp=4,pp=2,dp=8,zero=1,overlap_grad_reduce=true",
        256,
    ),
    "megatron-core 15b": (
        "nemotron-4-15b",
        "hgx-b200",
        "megatron-core",
        "tp=4,dp=16,sequence_parallel=true,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        256,
    ),
    "bridge 72b": (
        "qwen2-72b",
        "hgx-h200",
        "megatron-bridge",
        "tp=8,pp=4,dp=4,sequence_parallel=true,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        128,
    ),
    "nemo 12b": (
        "mistral-nemo-12b",
        "aws-p5",
        "nemo",
        "tp=2,dp=32,sequence_parallel=true,zero=1,overlap_grad_reduce=true,overlap_param_gather=true",
        256,
    ),
    "deepspeed gemma": ("gemma-7b", "perlmutter", "deepspeed", "dp=64,zero=2,recompute=full", 256),
    "torchtitan 13b": (
        "llama2-13b",
        "hgx-h200",
        "torchtitan",
        "dp=64,zero=2,recompute=selective",
        256,
    ),
    "nanotron 3b": ("llama3.2-3b", "dgx-a100", "nanotron", "tp=2,dp=32,zero=1,recompute=full", 256),
    "composer 30b": ("mpt-30b", "hgx-h200", "llm-foundry", "dp=64,zero=3,recompute=full", 256),
    "maxtext llama": ("codellama-7b", "dgx-a100", "maxtext", "dp=32,zero=3,recompute=full", 256),
    "fsdp olmo": ("olmo-2-7b", "aws-p5", "accelerate", "dp=16,zero=3,recompute=full", 64),
    "levanter 7b": ("llama2-7b", "dgx-a100", "levanter", "dp=32,zero=3,recompute=full", 256),
    "xtuner 20b": ("internlm2-20b", "hgx-h200", "xtuner", "dp=32,zero=3,recompute=full", 64),
}


@cache
def job(name: str) -> tuple[Problem, Layout]:
    described = JOBS[name]
    if isinstance(described, str):
        launch = pm.read_launch(LAUNCH_FILES / described, devices=64)
        assert launch.layout is not None
        return launch.problem("dgx-h100"), launch.layout
    model, cluster, framework, layout, global_batch = described
    problem = pm.problem(model, cluster, global_batch=global_batch, framework=framework)
    return problem, problem.framework.layout(layout, problem.model)[0]


def checked(run: SimulatedRun, seed: int = 7) -> RunHealth:
    """Simulate the run on a site that is a few percent off the typical one, write its log, and
    check it."""
    problem, layout = job(run.job)
    return check_run(problem, layout, parse_log(log_text(run, seed)))


def log_text(run: SimulatedRun, seed: int = 7) -> str:
    """Write the log of a simulated run."""
    problem, layout = job(run.job)
    step_problem = step_problem_of(problem)
    expected = explain(step_problem, layout)

    # The machine, the batch and the site decide how long each step takes.
    rng = np.random.default_rng(seed)
    site = np.exp(rng.normal(0.0, run.site_spread))
    batches = batches_of(run, problem.job.global_batch)
    seconds = steps_s(run, batches) * site * rng.normal(1.0, 0.01, STEPS)
    seconds[0] *= 5
    for step, more_s in run.stall_s.items():
        seconds[step - 1] += more_s
    growth = np.linspace(1.0, run.slower_later, STEPS)
    if run.slower_from:
        growth = np.where(np.arange(STEPS) < run.slower_from - 1, 1.0, run.slower_later)
    seconds *= growth

    settings = dict(run.states)
    if run.logs_options:
        settings |= {
            name: layout.value(name) for name in ("overlap_grad_reduce", "overlap_param_gather")
        }
        settings |= {ARGUMENTS.get(name, name): value for name, value in run.options.items()}
    text = write_log(
        run.form,
        WrittenRun(
            step_s=seconds.tolist(),
            devices=layout.devices,
            global_batch=int(str(run.states.get("global_batch_size", problem.job.global_batch))),
            batches=batches if run.first_batches else (),
            seq_len=problem.job.seq_len,
            flops_per_token=step_problem.flops / problem.job.global_batch / problem.job.seq_len,
            reserved_gib=expected.memory_counted_bytes["reserved"] / 2**30,
            checkpoints=list(run.saves),
            evaluations=list(run.evaluations),
            skipped=run.skipped,
            pause_after_s=dict(run.saves) | dict(run.evaluations),
            settings=settings,
            timers_ms=timers_ms(run) if run.timers else {},
            stragglers=straggler_report(run) if run.stragglers else {},
            loader_s=run.loader_s,
        ),
    )
    return run.spoil(text)


def batches_of(run: SimulatedRun, global_batch: int) -> list[int]:
    """The batch of every step: the first ones share the first third of the run."""
    batches = [global_batch] * STEPS
    for step in range(STEPS // 3 if run.first_batches else 0):
        batches[step] = run.first_batches[step * len(run.first_batches) * 3 // STEPS]
    return batches


def steps_s(run: SimulatedRun, batches: Sequence[int]) -> np.ndarray:
    """Seconds of every step on a typical site: healthy until the fault begins, and as long as their
    batch takes."""
    problem, layout = job(run.job)
    ran = replace(layout, **run.options)
    scenario = Scenario.parse(run.settings)
    step_problem = step_problem_of(problem)
    stated_batch = int(str(run.states.get("global_batch_size", problem.job.global_batch)))
    sick_s, healthy_s = {}, {}
    for batch in {*batches, stated_batch}:
        at_batch = replace(step_problem, job=replace(step_problem.job, global_batch=batch))
        sick_s[batch] = step_s(at_batch, ran, scenario)
        healthy_s[batch] = step_s(at_batch, ran, Scenario())
    seconds = []
    for step, batch in enumerate(batches, start=1):
        ran_batch = stated_batch if run.states.get("global_batch_size") else batch
        at_batch_s = sick_s if step >= run.begins_at else healthy_s
        waits = ran_batch / stated_batch if run.loads_by_sequence else 1.0
        seconds.append(at_batch_s[ran_batch] + waits * run.loader_s)
    return np.array(seconds)


ARGUMENTS = {"recompute": "recompute_granularity"}


def straggler_report(run: SimulatedRun) -> dict[str, tuple[float, float]]:
    """The straggler detector's report of a simulated step: forward passes, loading, clocks."""
    problem, layout = job(run.job)
    step_problem = step_problem_of(problem)
    scenario = Scenario.parse(run.settings)
    slowed = scenario.slowed(layout.pp)
    sick = explain(step_problem if slowed else model_in_scenario(step_problem, scenario), layout)
    factor = slowed[1] if slowed else 1.0
    forward_ms = passes_s(sick) * 1000 / (4 if layout.recompute == "full" else 3)
    clock_share = next(
        (setting.value for setting in scenario.settings if setting.name == "compute_rate"), 1.0
    )
    clock_mhz = 0.95 * clock_share * problem.cluster.device.clock_hz / 1e6
    least_mhz = clock_mhz / factor if run.clock_shows else clock_mhz
    return {
        "Rtt": (forward_ms, forward_ms * 1.01 * factor),
        "DRtt": (run.loader_s * 900 + 1.0, run.loader_s * 1000 + 5.0),
        "Clk": (0.985 * least_mhz, clock_mhz),
    }


def passes_s(prediction: pm.Prediction) -> float:
    """Seconds that a rank computes and communicates inside passes: the timers of passes do not hold
    the bubble."""
    beside = (
        "data_parallel_communication_exposed",
        "optimizer",
        "pipeline_communication_exposed",
        "bubble",
    )
    return prediction.step_time_s - sum(prediction.breakdown_s.get(part, 0.0) for part in beside)


def timers_ms(run: SimulatedRun) -> dict[str, tuple[float, float]]:
    """Milliseconds that the timers of Megatron-LM or DeepSpeed show for a simulated step."""
    problem, layout = job(run.job)
    step_problem = step_problem_of(problem)
    scenario = Scenario.parse(run.settings)
    slowed = scenario.slowed(layout.pp)
    sick = explain(step_problem if slowed else model_in_scenario(step_problem, scenario), layout)
    sync_ms = sick.breakdown_s["data_parallel_communication_exposed"] * 1000
    optimizer_ms = sick.breakdown_s["optimizer"] * 1000
    passes_ms = sick.step_time_s * 1000 - sync_ms - optimizer_ms
    factor = slowed[1] if slowed else 1.0
    waited_ms = max(0.0, step_s(step_problem, layout, scenario) * 1000 - sick.step_time_s * 1000)
    if run.form == "deepspeed":
        # Below ZeRO 3 gradients are reduced after the backward pass, and weights gathered within
        # the step.
        return {
            "fwd": (passes_ms / 3, passes_ms / 3),
            "bwd": (passes_ms * 2 / 3 + sync_ms / 2, passes_ms * 2 / 3 + sync_ms / 2),
            "bwd_inner": (passes_ms * 2 / 3, passes_ms * 2 / 3),
            "bwd_allreduce": (sync_ms / 2, sync_ms / 2 + waited_ms),
            "step": (optimizer_ms + sync_ms / 2, optimizer_ms + sync_ms / 2),
        }
    if run.barriers:
        passes_ms += waited_ms
        return {
            "forward-backward": (passes_ms, passes_ms * 1.001),
            "all-grads-sync": (sync_ms, sync_ms * 1.001),
            "optimizer": (optimizer_ms, optimizer_ms * 1.001),
        }
    passes_ms = passes_s(sick) * 1000
    return {
        "forward-compute": (passes_ms / 3, passes_ms / 3 * 1.01 * factor),
        "backward-compute": (passes_ms * 2 / 3, passes_ms * 2 / 3 * 1.02 * factor),
        "batch-generator": (run.loader_s * 900 + 1.0, run.loader_s * 1000 + 5.0),
        "all-grads-sync": (sync_ms, sync_ms * 1.02 + waited_ms),
        "optimizer": (optimizer_ms, optimizer_ms * 1.001),
    }
