"""Chimera's searches on Piz Daint (Li and Hoefler, arXiv 2107.06925, section 4.2): schemes, depth
and micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

import numpy as np
import pandas as pd
from studies.search_rank import USUAL, Ranked, rank

from perfmodel import catalog
from perfmodel.cost import EventTimes, KernelModel, PricesKernels
from perfmodel.ops import KernelOp
from perfmodel.planning.layouts import SearchSpace
from perfmodel.prediction import step_problem
from perfmodel.prediction.memory import needed_memory
from perfmodel.spec import Cluster, Device, Framework, Job, Layout, Model

Choice = tuple[int, int, str]
"""Pipeline depth, micro-batch and recompute."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model on a number of nodes with one P100 each."""

    model: str
    nodes: int
    batch: int
    seq_len: int
    best: dict[str, Choice]
    """Best depth and micro-batch of every scheme, best scheme first (figures 13 to 15)."""
    scales: tuple[int, ...]
    """Nodes of the weak-scaling figure, at the batch per node of `nodes`."""
    throughput: dict[str, float]
    """Relative to Chimera, at the largest scale (section 4.2.3)."""
    formula_gelu: bool
    """Whether the model's code writes GELU out (transformers' GPT-2) or has it in one kernel
    (NVIDIA's BERT)."""
    weight_loads: bool
    """Whether PipeDream-2BW loads weights name by name (the stored code of GPT-2; BERT's is not
    stored)."""

    def at(self, nodes: int) -> "Study":
        """This study on another number of nodes, with the same batch per node."""
        return replace(self, nodes=nodes, batch=self.batch * nodes // self.nodes)


STUDIES: Final = (
    Study(
        model="bert-48",
        nodes=32,
        batch=512,
        seq_len=128,
        scales=(16, 32, 64),
        formula_gelu=False,
        weight_loads=False,
        best={
            "chimera": (4, 8, "none"),
            "pipedream-2bw": (4, 16, "full"),
            "1f1b": (4, 4, "none"),
            "gpipe": (4, 4, "full"),
            "gems": (4, 32, "none"),
        },
        throughput={"pipedream-2bw": 1 / 1.17, "1f1b": 1 / 1.19, "gems": 1 / 2.41},
    ),
    Study(
        model="gpt2-1.3b",
        nodes=512,
        batch=512,
        seq_len=632,
        scales=(512, 1024, 2048),
        formula_gelu=True,
        weight_loads=True,
        best={
            "chimera": (32, 1, "none"),
            "pipedream-2bw": (16, 1, "full"),
            "1f1b": (16, 1, "full"),
            "gpipe": (8, 1, "full"),
            "gems": (8, 2, "none"),
        },
        throughput={
            "pipedream-2bw": 1 / 1.16,
            "1f1b": 1 / 1.38,
            "gpipe": 1 / 1.42,
            "gems": 1 / 2.34,
        },
    ),
)
"""`1f1b` is DAPPLE. PipeDream has batches of its own, and so a row of its own in figures 14 and 15
(`PIPEDREAM`)."""


@dataclass(frozen=True, kw_only=True)
class PipeDream:
    """PipeDream as in figures 14 and 15: it updates after every micro-batch, and stashes weights
    for each micro-batch in flight."""

    sequences_per_node: float
    """Of one update: 24 on 16 nodes to 96 on 64, and 128 on 512 to 512 on 2,048."""
    slower: float
    """Chimera's speed-up over it at the largest scale: the upper end over asynchronous schemes
    (section 4.2.3)."""


PIPEDREAM: Final = {
    "bert-48": PipeDream(sequences_per_node=1.5, slower=1.94),
    "gpt2-1.3b": PipeDream(sequences_per_node=0.25, slower=2.01),
}
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)
NAME_LOAD_S: Final = 2.5e-6
"""Seconds by which PipeDream-2BW's code loads one weight, per weight of the stage: it asks torch
for the dictionary of all of them again for each (github.com/Shigangli/Chimera 7be5274,
baselines/gpt2_pipedream2bw/ optimizer_with_stashing_and_aggregation.py, set_params), which others
found to take hours for large models (github.com/huggingface/transformers/pull/37178). Measured by
`name_load_s` on a processor of today; that those of the paper's nodes take as long is an
assumption, and older ones are slower."""
NAMES_PER_LAYER: Final = 14
"""Weights and buffers of a GPT-2 block in that code."""


@dataclass(frozen=True)
class ScaledKernels:
    """The shipped kernel prices, times a factor."""

    factor: float

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        """Time of each op on a device."""
        return KernelModel.load().times(device, ops).scaled(np.full(len(ops), self.factor))


@cache
def scaled_kernels(factor: float) -> ScaledKernels:
    """One `ScaledKernels` per factor for the whole process, because sessions tell prices apart by
    identity."""
    return ScaledKernels(factor)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The hardware and software that the schemes run on, term by term."""

    cluster: Cluster = field(default_factory=lambda: catalog.cluster("piz-daint-gloo"))
    framework: Framework = field(default_factory=lambda: catalog.framework("chimera@2021"))
    formula_gelu: bool = True
    """GELU written out, where the model's code does so."""
    stashes: bool = True
    """PipeDream-2BW computes with a copy of the weights beside its two versions, and loads them
    into it."""
    full_pipelines: bool = True
    """Chimera and PipeDream-2BW run multiples of as many micro-batches as stages (`update_interval`
    of their code)."""
    kernel_factor: float = 1.0
    """Every kernel takes so many times what it is predicted to: T_f as calibrated on one of the
    paper's rows."""

    @property
    def kernels(self) -> PricesKernels | None:
        """Kernel prices; None for the shipped ones."""
        return None if self.kernel_factor == 1.0 else scaled_kernels(self.kernel_factor)

    def at_rate(self, bytes_per_s: float) -> "Conditions":
        """These conditions with another rate of the network."""
        level = replace(self.cluster.levels[0], bandwidth_bytes_per_s=bytes_per_s)
        return replace(self, cluster=replace(self.cluster, levels=(level,)))

    def with_margin(self, share: float) -> "Conditions":
        """These conditions with another share of the memory that is lost."""
        return replace(self, framework=self.framework.replace(memory_margin=share))

    def job(self, study: Study, model: Model) -> Job:
        """The job of a step: fp32 and Adam, as in the authors' code."""
        # GELU written out is several kernels more, each with memory of its own.
        kernels = self.framework.default_job.kernels.eager_kernels
        if study.formula_gelu and self.formula_gelu:
            kernels = (*kernels, "gelu_formula")
        return self.framework.job(
            model,
            self.cluster.device,
            global_batch=study.batch,
            seq_len=study.seq_len,
            dtype="fp32",
            eager_kernels=kernels,
        )


def space_of(model: Model, scheme: str) -> SearchSpace:
    """Every depth, micro-batch and recompute (none or full) of a scheme. Chimera reduces the
    gradients of outer stages in bubbles (`eager_opt`), the others after the last backward."""
    # Stages of equal length alone.
    stages = tuple(pp for pp in (2, 4, 8, 16, 32, 64) if model.layers % pp == 0)  # pyright: ignore[reportAttributeAccessIssue]
    return replace(
        USUAL,
        pp=stages,
        micro_batch=MICRO_BATCHES,
        schedule=(scheme,),
        recompute=("none", "full"),
        overlap_grad_reduce=(scheme.startswith("chimera"),),
    )


def chimera_search(study: Study, scheme: str, conditions: Conditions | None = None) -> Ranked:
    """Layouts of a scheme that fit, fastest first."""
    conditions = conditions or Conditions()
    model = catalog.model(study.model)
    job = conditions.job(study, model)
    ranked = rank(
        model,
        conditions.cluster,
        job,
        study.nodes,
        space_of(model, scheme),
        framework=conditions.framework,
        kernels=conditions.kernels,
    )
    if conditions.full_pipelines and scheme in ("chimera", "pipedream-2bw"):
        ranked = ranked.only(
            [job.num_microbatches(layout) % layout.pp == 0 for layout in ranked.layouts]
        )
    if scheme == "pipedream-2bw" and conditions.stashes:
        ranked = _stashed(ranked, study, conditions, model, job)
    return ranked


def _stashed(
    ranked: Ranked, study: Study, conditions: Conditions, model: Model, job: Job
) -> Ranked:
    """Layouts that fit PipeDream-2BW as its code runs it: with a third copy of the weights, and the
    time to load them."""
    problem = step_problem(model, conditions.cluster, job, framework=conditions.framework)
    peak_bytes = []
    for layout in ranked.layouts:
        # `weights` has two versions already: half of it is one copy.
        ranks = needed_memory(problem, layout)
        peak_bytes.append(max(rank.peak + rank.weights / 2 for rank in ranks))
    ranked = ranked.only(np.array(peak_bytes) <= problem.usable_bytes)
    if not study.weight_loads:
        return ranked

    # The loads of a stage grow with the square of its weights, so that the order may change.
    step_s = ranked.step_s + [loads_s(layout, job, model) for layout in ranked.layouts]
    order = np.argsort(step_s, kind="stable")
    return Ranked(tuple(ranked.layouts[i] for i in order.tolist()), step_s[order])


def loads_s(layout: Layout, job: Job, model: Model) -> float:
    """Seconds that PipeDream-2BW's first stage spends on loading weights in a step.

    Of m micro-batches p - 1 find the other version in place at their forward, and as many at their
    backward; the optimizer loads the newest. The host does nothing else meanwhile.
    """
    names = NAMES_PER_LAYER * model.layers / layout.pp  # pyright: ignore[reportAttributeAccessIssue]
    loads = 2 * min(layout.pp - 1, job.num_microbatches(layout)) + 1
    return loads * NAME_LOAD_S * names**2


def choices_of(ranked: Ranked) -> list[Choice]:
    """Depth, micro-batch and recompute of each layout, as the paper states them."""
    return [(layout.pp, layout.micro_batch, layout.recompute) for layout in ranked.layouts]


def time_of(ranked: Ranked, choice: Choice) -> float:
    """Step time of a choice, infinite where it does not fit."""
    choices = choices_of(ranked)
    return float(ranked.step_s[choices.index(choice)]) if choice in choices else np.inf


def chimera_table(study: Study, conditions: Conditions | None = None) -> pd.DataFrame:
    """Schemes in the paper's order: its choice and ours, what its choice takes more by our
    evaluation, and what each scheme does of Chimera's throughput at the largest scale, all at the
    paper's choices."""
    rows = []
    reference = None
    for scheme, choice in study.best.items():
        ranked = chimera_search(study, scheme, conditions)
        ours = choices_of(ranked)[0]
        # Throughputs are stated at the largest scale, for the choices of the study's own scale.
        at_scale = time_of(chimera_search(study.at(study.scales[-1]), scheme, conditions), choice)
        # Chimera comes first in the table of a study: the others are told relative to it.
        reference = reference or at_scale
        rows.append(
            {
                "scheme": scheme,
                "paper p, b": written(choice),
                "ours p, b": written(ours),
                "same": ours == choice,
                "same p": ours[0] == choice[0],
                "paper's/ours": time_of(ranked, choice) / float(ranked.step_s[0]),
                "paper, of Chimera's": study.throughput.get(
                    scheme, 1.0 if scheme == "chimera" else np.nan
                ),
                "ours, of Chimera's": reference / at_scale,
            }
        )
    return pd.DataFrame(rows)


def written(choice: Choice) -> str:
    """Format a choice as the paper's figures do, with R for recompute."""
    return f"{choice[0]}, {choice[1]}" + (", R" if choice[2] == "full" else "")


def name_load_s() -> float:
    """Measure `NAME_LOAD_S` on this machine; needs torch."""
    from time import perf_counter

    import torch  # pyright: ignore[reportMissingImports]

    def block() -> torch.nn.Module:
        """A block with as many names of weights and buffers as that code's GPT-2 has."""
        parts = {
            name: torch.nn.Linear(4, 4)
            for name in ("ln_1", "c_attn", "attn_proj", "ln_2", "c_fc", "c_proj")
        }
        drops = {f"dropout_{i}": torch.nn.Dropout() for i in range(3)}
        modules = torch.nn.ModuleDict(parts | drops)
        modules.register_buffer("bias", torch.ones(1))
        modules.register_buffer("masked_bias", torch.ones(1))
        return modules

    # Eight blocks, so that the square of the number of names dominates.
    stage = torch.nn.ModuleList([block() for _ in range(8)])
    values = {name: value.clone() for name, value in stage.state_dict().items()}
    times = []
    for _ in range(5):
        start = perf_counter()
        for name, value in values.items():
            # The dictionary of all names is built anew for every one of them, as in that code.
            stage.state_dict()[name].data.copy_(value)
        times.append(perf_counter() - start)
    # The fastest of five: others only ever make it longer.
    return min(times) / len(values) ** 2
