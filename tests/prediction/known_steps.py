"""Step times and memory of several steps with every optional feature, kept in `known_steps.csv`.

Each base is predicted as it is, then with one field of its layout, its job or its framework
changed, then with several at once. Prices are constant rates and no constant is fitted, so that new
weights or facts move nothing here. A change that is meant to move answers is followed by

    PYTHONPATH=tests python tests/prediction/known_steps.py
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from constant_rates import SITE, Rates
from optional_features import other_values
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.prediction import (
    Prediction,
    StepProblem,
    check_layout,
    explain,
    layout_batches,
    step_problem,
)
from perfmodel.schedule import schedule_names
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Transformer
from perfmodel.spec.framework_facts import MemoryCosts

TABLE = Path(__file__).with_suffix(".csv")
COMBINED = 12
"""Variants of each base with several changes at once."""
H100 = catalog.cluster("dgx-h100")
MIXED = Cluster.of_kinds(
    "mixed",
    [
        replace(catalog.cluster(name), name=name[-4:], max_devices=64)
        for name in ("dgx-a100", "dgx-h100")
    ],
)
FRAMEWORK = Framework(name="anybody's", memory=MemoryCosts(communicator_bytes=1e8))
FRAMEWORK_SECTIONS = ("host", "communication", "memory")


@dataclass(frozen=True)
class Step:
    """What a step is predicted from."""

    model: Model
    layout: Layout
    job: Job
    cluster: Cluster = H100
    framework: Framework = FRAMEWORK


def _small(name: str, layers: int, **changes: Any) -> Model:
    return replace(catalog.model(name), layers=layers, **changes)


# Degrees that are taken for one another by mistake differ in every base.
BASES = {
    "dense": Step(
        _small("llama3-8b", 8),
        Layout(
            tp=4, pp=2, cp=2, dp=8, vpp=2, schedule="interleaved", zero=1, sequence_parallel=True
        ),
        Job(global_batch=64, seq_len=4096),
    ),
    "sharded": Step(
        _small("gpt3-1.3b", 4),
        Layout(dp=16, zero=3, micro_batch=2, recompute="full"),
        Job(global_batch=64, seq_len=1024),
    ),
    "experts": Step(
        _small("mixtral-8x7b", 4),
        Layout(
            tp=2, pp=4, dp=16, ep=4, etp=1, zero=2, recompute="selective", sequence_parallel=True
        ),
        Job(global_batch=128, seq_len=2048, optimizer="muon"),
    ),
    "adapters": Step(
        _small("qwen2.5-3b", 4),
        Layout(tp=4, pp=2, dp=2, micro_batch=4),
        Job(global_batch=32, seq_len=1024, frozen=True, adapter_rank=16, dtype="fp16"),
    ),
    "fp8": Step(
        _small("llama3-8b", 6),
        Layout(tp=2, dp=8, zero=1, tp_overlap=True, sequence_parallel=True),
        Job(global_batch=32, seq_len=2048, dtype="fp8", fp8_recipe="delayed"),
    ),
    "two kinds of nodes": Step(
        _small("llama3-8b", 8),
        Layout(tp=2, pp=4, dp=2, zero=1, kinds=("a100", "a100", "h100", "h100")),
        Job(global_batch=32, seq_len=2048),
        MIXED,
    ),
    "newer nodes first": Step(
        _small("mixtral-8x7b", 4),
        Layout(
            tp=4, pp=2, dp=4, ep=2, etp=1, zero=1, sequence_parallel=True, kinds=("h100", "a100")
        ),
        Job(global_batch=32, seq_len=1024),
        MIXED,
    ),
    "encoder and decoder": Step(
        catalog.model("t5-v1.1-base"), Layout(tp=2, dp=4, zero=2), Job(global_batch=32, seq_len=512)
    ),
    "sharded experts": Step(
        _small("mixtral-8x7b", 2),
        Layout(tp=2, dp=16, ep=4, etp=1, zero=3, sequence_parallel=True),
        Job(global_batch=32, seq_len=1024),
    ),
    "one replica": Step(
        _small("llama3-8b", 4), Layout(tp=4, pp=2, micro_batch=2), Job(global_batch=8, seq_len=1024)
    ),
    "images": Step(
        catalog.model("resnet-50"), Layout(dp=8, micro_batch=32), Job(global_batch=512, seq_len=1)
    ),
}
VARIED = {
    "dense": ("layout", "framework"),
    "sharded": ("layout", "framework"),
    "experts": ("job",),
}
"""Records of which a base is tried with every change of one field."""
MEMORY = tuple((("framework", name, value),) for name, value in other_values(FRAMEWORK.memory))
TRIED: dict[str, tuple[tuple[tuple[str, str, Any], ...], ...]] = {
    # Overlap that is lost shows where nothing else lengthens steps.
    "dense": ((("framework", "contends", False), ("framework", "dp_overlap_loss", 0.25)),),
    # A secondary copy of one rank is none: as many ranks as there are shards gather it.
    "sharded": (
        *((("job", name, value),) for name, value in other_values(BASES["sharded"].job.gradients)),
        # More layers than there are segments of a stage: some are exchanged in one.
        (("model", "layers", 18),),
        (("job", "secondary_shards", 1),),
        (("job", "secondary_shards", 4), ("layout", "recompute", "none")),
        # The host copies vectors of layers one by one too: biases, scales and shifts.
        *(
            (("framework", "partition_copy_s", 1e-4), ("model", name, value))
            for name, value in (("norm", "rms_norm"), ("norm_bias", False), ("bias", False))
        ),
    ),
    "sharded experts": (
        (("job", "secondary_shards", 2),),
        (("job", "frozen_embedding", True),),
        (("job", "expert_imbalance", 1.5),),
        (("framework", "live_params", 1e8), ("layout", "recompute", "full")),
        (("layout", "etp", 2),),
        (("layout", "overlap_param_gather", False),),
        *MEMORY,
    ),
    # What the optimizer's step takes is that of trained weights, not of adapters.
    "adapters": (
        (("framework", "step_bytes_per_param", 5e3),),
        (("job", "dtype", "fp8"),),
    ),
}
"""Changes of a base that have an effect in it."""


def changes_of(step: Step) -> Iterator[tuple[str, str, Any]]:
    """Every change of one field: of which record, its name, its value."""
    for name, value in other_values(step.layout):
        yield "layout", name, value
    for name in schedule_names():
        yield "layout", "schedule", name
    stages = step.layout.pp * step.layout.vpp
    if isinstance(step.model, Transformer) and stages > 1:
        each = step.model.layers // stages
        yield "layout", "partition", (each + 1, *[each] * (stages - 2), each - 1)
    yield "layout", "recompute_full_layers", (1,)
    yield "layout", "order", "pp-tp-cp-ep-dp"
    for name, value in other_values(step.job):
        yield "job", name, value
    for name in ("lamb", "lion", "sgd", "adafactor", "plain-sgd", "adam16bit", "muon"):
        yield "job", "optimizer", name
    yield "job", "grad_dtype", "bf16"
    yield "job", "dtype", "fp32"
    for section in FRAMEWORK_SECTIONS:
        for name, value in other_values(getattr(step.framework, section)):
            yield "framework", name, value


def changed(step: Step, record: str, name: str, value: Any) -> Step:
    """The step with one field of a record changed."""
    changes = {name: value}
    if name == "schedule":
        changes["vpp"] = 2 if value in ("interleaved", "breadth-first") else 1
    return replace(step, **{record: getattr(step, record).replace(**changes)})


def step_figures(step: Step) -> dict[str, float]:
    """Figures of a step's prediction, and how its program is built."""
    check_layout(step.model, step.cluster, step.job, step.layout)
    # One problem for both: what it holds is priced once.
    problem = _problem(step)
    return figures(explain(problem, step.layout)) | structure(problem, step.layout)


def _problem(step: Step) -> StepProblem:
    problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
    return problem.repriced(Rates(), Rates())


def structure(problem: StepProblem, layout: Layout) -> dict[str, float]:
    """Facts of a step's program, as names with the value 1; some of them show in no figure."""
    (batch,) = layout_batches(problem, [layout])
    values = {field.name: getattr(batch.spec, field.name) for field in fields(batch.spec)}
    words = (
        f"program.{name}.{value}" for name, value in values.items() if isinstance(value, (str, int))
    )
    return {"".join(word.split()): 1.0 for word in words}


def figures(prediction: Prediction) -> dict[str, float]:
    """Figures of a prediction by name, without those that are 0."""
    account, memory = prediction.time_account, prediction.memory_account
    figures = {
        "step": prediction.step_time_s,
        "lo": prediction.step_time_lo_s,
        "hi": prediction.step_time_hi_s,
        "mfu": prediction.mfu,
        "fits": prediction.fits_probability,
        "busy": account.busy_fraction,
        "kernels": account.kernels_alone_s,
    }
    figures |= {f"time.{name}": seconds for name, seconds in account.breakdown_s.items()}
    figures |= {f"count.{name}": n_bytes for name, n_bytes in memory.counted_bytes.items()}
    figures |= {
        f"share.{name}": share for name, share in prediction.uncertainty.class_shares.items()
    }
    for rank in (0, len(memory.needed_per_stage) - 1):
        for name, n_bytes in memory.needed_per_stage[rank].to_dict().items():
            figures[f"rank{rank}.{name}"] = n_bytes
    for event in account.critical_path:
        name = f"path.{event.event.replace(' ', '-')}"
        figures[name] = figures.get(name, 0.0) + event.time_s
    return {name: value for name, value in figures.items() if abs(value) > 1e-12}


def cases() -> Iterator[StoredCase]:
    """Figures of every base and of its possible variants."""
    # All bases are first, so that most changes of a formula are seen within seconds.
    for base, step in BASES.items():
        yield StoredCase(base, base, step_figures(step))
    for base, step in BASES.items():
        changes = list(dict.fromkeys(changes_of(step)))
        for change in changes:
            if change[0] in VARIED.get(base, ()):
                yield from _case(base, step, [change])
        for tried in TRIED.get(base, ()):
            yield from _case(base, step, tried)
        for place in range(COMBINED):
            yield from _case(base, step, _combined(f"{base} {place}", changes))


def _combined(name: str, changes: Sequence[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    """Four changes drawn by a name, most of which stay the same where changes are added."""
    # A hash ranks each change by itself; a generator's draws would all move with their number.
    ranks = {str(change): zlib.crc32(f"{name} {change}".encode()) for change in changes}
    return sorted(changes, key=lambda change: ranks[str(change)])[:4]


def _case(base: str, step: Step, changes: Sequence[tuple[str, str, Any]]) -> Iterator[StoredCase]:
    """The figures of a variant, where it is possible."""
    try:
        for change in changes:
            step = changed(step, *change)
        varied = step_figures(step)
    except PerfModelError:
        return
    yield StoredCase(base, ", ".join(f"{name}={value}" for _, name, value in changes), varied)


if __name__ == "__main__":
    write_cases(TABLE, cases())
