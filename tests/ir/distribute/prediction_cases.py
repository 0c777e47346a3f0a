"""The same model, layout and job as a program and as what a prediction composes, written down
alike."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from perfmodel import catalog
from perfmodel.cost import EventTimes
from perfmodel.ir import OPS, Instruction, Program, instruction_devices
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import placed
from perfmodel.ir.models import Adam, TransformerSize, training_step, transformer_loss
from perfmodel.ops import Attention, Collective, Embedding, Gemm, MemoryBound, Op, OptimizerStep
from perfmodel.prediction import (
    LayoutBatch,
    Site,
    StepProblem,
    layout_batches,
    prepared,
    shard_events,
)
from perfmodel.prediction.composition import bundle_events, event_entries
from perfmodel.prediction.phases import PASS_KINDS, phase_counts
from perfmodel.program import Kind
from perfmodel.spec import Framework, Job, Layout, Transformer

LAYERS, HIDDEN, HEADS, VOCAB, SEQ_LEN, BATCH = 10, 64, 4, 512, 16, 8
SIZE = TransformerSize(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq_len=SEQ_LEN)
MODEL = Transformer(
    name="small",
    layers=LAYERS,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    ffn_hidden=4 * HIDDEN,
    vocab=VOCAB,
    seq_len=SEQ_LEN,
    tied_embeddings=False,
    dropout=False,
)
JOB = Job(
    global_batch=BATCH, seq_len=SEQ_LEN, dtype="fp32", grad_dtype="fp32", stops_recompute=True
)
A100 = catalog.cluster("dgx-a100")
CLUSTER = replace(
    A100,
    levels=tuple(
        replace(A100.levels[0], name=f"of {n}", size=n, contention=0.0) for n in (4, 8, 64)
    ),
)
"""Nodes of four in racks of eight: groups of every dimension lie inside nodes, across them and
across racks."""
FRAMEWORK = Framework(host_op_s=0.0, kernel_gap_s=0.0, tp_overlap_loss=1.0)
"""A host that costs nothing; collectives of tensor-parallel ranks hold up the kernels beside them,
as in programs."""
POSITION_BYTES = 4 * SEQ_LEN * HIDDEN
"""Of the replicated table of positions, of which sequence parallelism needs on a rank those of its
tokens."""
LOSS_BYTES = 4 * 2 * SEQ_LEN
"""Of collectives of the loss, one number per token; any of gradients or weights is larger."""

Blocks = Literal["none", "one_norm", "two_norms"]
"""How attention and feed-forward of a layer follow one another (`Transformer.parallel_blocks`)."""
Pass = tuple[int, str, int]
"""Pipeline rank, phase and micro-batch."""
Exchanged = tuple[int, str, int, int, int, int]
"""Pipeline rank, kind of the collective, its ranks, those per node, network level, and like groups
beside it."""


@cache
def canonical(op: Op) -> Op | None:
    """The op in a form that both sides share; None for ops that one side fuses."""
    match op:
        case Gemm(pass_="wgrad"):  # of a weight or of its transpose
            return replace(op, m=max(op.m, op.n), n=min(op.m, op.n))
        case Collective():
            return None if is_of_loss(op) else op
        case Gemm() | Attention():
            return op
        case Embedding():
            return None if op.vocab == SEQ_LEN else op
        case MemoryBound():
            residual = op.op == "add" and op.n_inputs == 2 and op.hidden == HIDDEN
            return op if op.op == "layer_norm" or residual else None
    return None


def is_of_loss(op: Collective) -> bool:
    """Whether an op belongs to the vocabulary-parallel loss; see `test_the_loss_is_reduced`."""
    return op.collective == "all_to_all" or op.bytes <= LOSS_BYTES


def price_s(op: Op, free: Collection[str] = ()) -> float:
    """Time in proportion to the work; 0 for ops that only one side has."""
    if isinstance(op, OptimizerStep) or (isinstance(op, MemoryBound) and op.op == "adam"):
        n_params = op.n_params if isinstance(op, OptimizerStep) else op.rows * op.hidden
        return 0.0 if op.op in free else 1e-3 * n_params
    if isinstance(op, Collective):
        if op.collective == "send_recv" or op.collective in free or is_of_loss(op):
            return 0.0
        return 1e-3 * op.bytes * (1 + op.level) * (2 if op.collective == "all_reduce" else 1)
    if isinstance(op, MemoryBound) and op.op == "add":  # sums of gradients look like residual ones
        return 0.0
    return 1e-6 * op.flops if canonical(op) else 0.0


@dataclass(frozen=True)
class Prices:
    """`price_s` as prices of kernels and of collectives."""

    free: Collection[str] = ()

    def times(self, where: object, ops: Sequence[Op]) -> EventTimes:
        time_s = np.array([price_s(op, self.free) for op in ops])
        return EventTimes(time_s=time_s, lo_s=time_s, hi_s=time_s, provenance=("given",) * len(ops))


@cache
def one_device(blocks: Blocks = "none") -> Program:
    return training_step(transformer_loss(replace(SIZE, parallel_blocks=blocks), BATCH), Adam())


@cache
def distributed(layout: Layout, blocks: Blocks) -> Program:
    return distribute(one_device(blocks), replace(Degrees.of(layout, BATCH), send_stream="send"))


def with_blocks(blocks: Blocks) -> Transformer:
    return replace(MODEL, parallel_blocks=blocks)


def composed(
    layout: Layout, free: Collection[str] = (), model: Transformer = MODEL
) -> tuple[StepProblem, LayoutBatch]:
    """One step of a layout; collectives of kinds that are `free` take no time."""
    prices = Prices(free)
    problem = StepProblem(
        model=model,
        job=JOB,
        cluster=CLUSTER,
        kernels=prices,
        collectives=prices,
        framework=FRAMEWORK,
        site=Site(skew=0.0),  # ranks of a program reach its collectives together
    )
    (layout_batch,) = layout_batches(problem, [layout])
    # programs have no norm of the gradient, for which a prediction lets the updates of all ranks
    # wait, and are of one step, where a prediction of a schedule without a flush is of a stream of
    # them
    spec = replace(layout_batch.spec, grad_norm_barrier=False, steps=1)
    return problem, replace(layout_batch, program=layout_batch.program.with_spec(spec))


# --- what programs of the IR do
# ---------------------------------------------------------------------


def works(
    program: Program, wanted: Callable[[Instruction], bool] = lambda instruction: True
) -> list[tuple[Instruction, tuple[int, ...], list[Op]]]:
    """List every wanted instruction with its devices and its kernels and collectives."""
    function = program.function
    types = program.types
    work_of_instructions = []
    known = {}
    for instruction, group in zip(
        function.instructions, instruction_devices(function), strict=True
    ):
        if not wanted(instruction):
            continue
        operands = [types[name] for name in (*instruction.inputs, *instruction.outputs)]
        # equal types are one object
        key = (
            instruction.op,
            instruction.attributes,
            tuple(map(id, operands)),
        )
        if key not in known:
            inputs = len(instruction.inputs)
            attributes = dict(instruction.attributes)
            work = OPS[instruction.op].work(
                tuple(operands[:inputs]), tuple(operands[inputs:]), attributes
            )
            known[key] = [placed(op, group, CLUSTER, function.n_devices) for op in work]
        work_of_instructions.append((instruction, group, known[key]))
    return work_of_instructions


def is_exchange(instruction: Instruction) -> bool:
    return OPS[instruction.op].collective and instruction.tag.stream == "data_comm"


def is_of_pass(instruction: Instruction) -> bool:
    return not (
        instruction.tag.phase == "update"
        or instruction.op in ("send", "accumulate")
        or is_exchange(instruction)
    )


def program_passes(program: Program, layout: Layout) -> dict[Pass, Counter[Op]]:
    """Ops of every pass; all ranks of a stage must agree."""
    ops_of_device: dict[tuple[int, str, int], Counter[Op]] = {}
    for instruction, group, work in works(program, is_of_pass):
        tag = instruction.tag
        known = [op for op in map(canonical, work) if op]
        for device in group:
            ops_of_device.setdefault(
                (device, tag.phase, max(tag.micro_batch, 0)), Counter()
            ).update(known)
    stage_size = layout.devices // layout.pp
    ops_of_passes: dict[Pass, Counter[Op]] = {}
    for (device, phase, micro_batch), ops in ops_of_device.items():
        assert ops_of_passes.setdefault((device // stage_size, phase, micro_batch), ops) == ops
    return ops_of_passes


def program_exchanges(program: Program, layout: Layout) -> Counter[Exchanged]:
    """Bytes of the collectives that exchange gradients and weights, by pipeline rank and group, in
    a program; those of the loss are left out."""
    stage_size = layout.devices // layout.pp
    sent_bytes: Counter[Exchanged] = Counter()
    for instruction, group, work in works(program, is_exchange):
        # The loss is a scalar.
        if not program.types[instruction.inputs[0]].shape:
            continue
        # The first device of a stage stands for all.
        stages = [device // stage_size for device in group if device % stage_size == 0]
        for op in work:
            if isinstance(op, Collective):
                for stage in stages:
                    sent_bytes[exchanged(stage, op)] += round(op.bytes)
    return sent_bytes


def exchanged(rank: int, op: Collective) -> Exchanged:
    return rank, op.collective, op.num_ranks, op.ranks_per_node, op.level, op.concurrent


# --- what a prediction composes
# ---------------------------------------------------------------------


def composed_passes(problem: StepProblem, layout_batch: LayoutBatch) -> dict[Pass, Counter[Op]]:
    """Ops of every pass of the composed step."""
    structure = prepared(layout_batch.spec).structure
    slices = layout_batch.spec.scheduler.slices
    blocks = layout_batch.program.passes
    ops_of_passes: dict[Pass, Counter[Op]] = {}
    for device, number, micro_batch in zip(
        structure.device, structure.duration, structure.micro_batch, strict=True
    ):
        kind = Kind(structure.class_kind[number])
        if kind not in PASS_KINDS:
            continue
        _, part, _ = structure.variants[structure.class_variant[number]].tolist()
        events = shard_events(problem.setting, layout_batch.layouts[0], slices, part)
        counts_of_blocks = phase_counts(
            kind, layout_batch.layouts[0].recompute, blocks.blocks[number], blocks.full[number]
        )
        counts = np.einsum("bp,bpo->o", counts_of_blocks, events.counts)
        phase = "forward" if kind == Kind.FORWARD else "backward"
        span = int(structure.class_span[number])
        for op, n in zip(map(canonical, events.ops), counts, strict=True):
            # in one go, or one after another in a program
            for k in range(int(micro_batch), int(micro_batch) + span):
                if op and n:
                    ops_of_passes.setdefault((int(device), phase, k), Counter())[op] += round(n)
    return ops_of_passes


def composed_exchanges(problem: StepProblem, layout_batch: LayoutBatch) -> Counter[Exchanged]:
    """Bytes of the collectives that exchange gradients and weights, by pipeline rank and group, in
    the composed step."""
    structure = prepared(layout_batch.spec).structure
    events = bundle_events(problem, layout_batch, 0)
    ops = list(events.ops)
    exchanges: Counter[Exchanged] = Counter()
    for duration_class, event in zip(*event_entries(structure, events), strict=True):
        op = ops[event]
        if not isinstance(op, Collective) or op.collective == "send_recv":
            continue
        for device in structure.device[structure.duration == duration_class].tolist():
            exchanges[exchanged(device, op)] += round(op.bytes)
    return exchanges
