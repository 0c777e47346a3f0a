"""The program that `distribute` writes against the one that `predict` composes of the same model,
layout and job.

Both are asked for the same GPT-2 in fp32. What must be the same: every product, attention, look-up
of the vocabulary, norm and residual sum, with shape and count, of every rank, pass and micro-batch;
every collective and message, with kind, bytes, ranks and place on the network; the step time where
all of these have the same prices; parameters, gradients and moments, micro-batches in flight, and
what each leaves behind. Where the two sides mean different things the difference is stated by a
test of its own, exactly:

- bias, activation and loss are fused kernels in a prediction and several in a program, and
  positions are looked up in a prediction and added in a program: these take no time here;
- a program exchanges gradients and weights one by one, a prediction by stage: they are compared in
  sum, and priced by their bytes alone.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from distribute_cases import FULL_GRID
from prediction_cases import (
    BATCH,
    CLUSTER,
    HEADS,
    HIDDEN,
    JOB,
    LAYERS,
    MODEL,
    POSITION_BYTES,
    SEQ_LEN,
    SIZE,
    Blocks,
    canonical,
    composed,
    composed_exchanges,
    composed_passes,
    distributed,
    is_exchange,
    is_of_loss,
    price_s,
    program_exchanges,
    program_passes,
    with_blocks,
    works,
)
from thinned import one_in

from perfmodel.errors import LayoutError
from perfmodel.ir import GlobalTensor, Program
from perfmodel.ir.distribute import Degrees, default_stages, distribute
from perfmodel.ir.execution import program_structure, simulate
from perfmodel.ir.models import training_step, transformer_loss
from perfmodel.ops import Attention, Collective, Gemm, Op
from perfmodel.prediction import LayoutBatch, durations, prepared, shard_events
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.composition import bundle_events, event_entries, program_live
from perfmodel.prediction.memory import bundle_memory
from perfmodel.prediction.phases import Phase
from perfmodel.program import Kind
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Layout
from perfmodel.spec.parts import Experts
from perfmodel.timeline import times


def layouts() -> list[Layout]:
    """Combinations of degrees, ZeRO, recompute and sequence parallelism, or one in so many of
    them."""
    every = [
        Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            zero=zero,
            recompute=recompute,
            sequence_parallel=sequence,
            micro_batch=micro_batch,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        for tp, pp, dp, zero, recompute, sequence, micro_batch in product(
            (1, 2, 4),
            (1, 2, 4),
            (1, 2, 4),
            range(4),
            ("none", "selective", "full"),
            (False, True),
            (1, 2),
        )
        if (dp > 1 or zero == 0) and (tp > 1 or not sequence)
    ]
    # a stride that is prime to the sizes of all axes walks through all of their values
    return every if FULL_GRID else every[::37]


def pipelines() -> list[Layout]:
    """Every synchronous schedule, on two and on four ranks with as many chunks as it takes."""
    found: dict[tuple[str, int, int], Layout] = {}
    for name, pp, vpp in product(schedule_names(), (2, 4), (1, 2)):
        scheduler = get_schedule(name)
        if scheduler.asynchronous or name == "forward":
            continue
        try:
            key = name, pp, scheduler(pp, BATCH, vpp).n_stages
        except LayoutError:
            continue
        found.setdefault(key, Layout(pp=pp, vpp=vpp, schedule=name, overlap_grad_reduce=False))
    return list(found.values())


def sliced() -> list[Layout]:
    """Slices of sequences with the other dimensions."""
    plain = Layout(schedule="seq1f1b:4", overlap_grad_reduce=False, overlap_param_gather=False)
    return [
        plain.replace(pp=1),
        plain.replace(pp=2, tp=2, dp=2),
        plain.replace(pp=2, tp=2, sequence_parallel=True, schedule="seq1f1b"),
        plain.replace(pp=4, dp=2, zero=1, micro_batch=2),
        plain.replace(pp=2, dp=2, zero=3, schedule="seq1f1b"),
        plain.replace(pp=2, recompute="full"),
    ]


GRID, PIPELINES = layouts(), pipelines()
EVERY = [*GRID, *PIPELINES, *sliced()]
PARALLEL: list[Blocks] = ["one_norm", "two_norms"]
Case = tuple[Layout, Blocks]
CASES: list[Case] = [
    *[(layout, "none") for layout in EVERY],
    *[
        (layout, blocks)
        for k, blocks in enumerate(PARALLEL)
        for layout in [*GRID[k::4], *sliced()[k::2]]
    ],
]
"""All with sub-layers one after the other, and some with these side by side."""


@pytest.fixture(scope="module", autouse=True)
def programs_are_forgotten() -> Iterator[None]:
    """Those of all layouts take a third of a gigabyte."""
    yield
    distributed.cache_clear()


def test_the_grid_has_every_dimension_and_schedule() -> None:
    assert {layout.schedule for layout in PIPELINES} == {
        "1f1b",
        "breadth-first",
        "chimera",
        "chimera-doubling",
        "chimera-halving",
        "dualpipe",
        "dualpipe-v",
        "gems",
        "gpipe",
        "interleaved",
        "seq1f1b",
        "v-half",
        "v-min",
        "zb-h1",
        "zb-h2",
        "zb-v",
    }
    for name, values in {
        "tp": {1, 2, 4},
        "pp": {1, 2, 4},
        "dp": {1, 2, 4},
        "zero": {0, 1, 2, 3},
    }.items():
        assert {layout.value(name) for layout in GRID} == values
    assert {(layout.recompute, layout.effective_sequence_parallel) for layout in GRID} == {
        *product(("none", "selective", "full"), (False, True))
    }


@pytest.mark.parametrize(("layout", "blocks"), one_in(2, CASES), ids=str)
def test_passes_have_the_same_kernels_and_collectives(layout: Layout, blocks: Blocks) -> None:
    problem, layout_batch = composed(layout, model=with_blocks(blocks))
    found, want = (
        program_passes(distributed(layout, blocks), layout),
        composed_passes(problem, layout_batch),
    )
    for (_, phase, _), ops in found.items():
        if phase == "backward" and layout.recompute == "selective":
            # fused attention repeats its scores anyway: in programs there is nothing else to
            # recompute
            ops.update(
                {replace(op, pass_="fwd"): n for op, n in ops.items() if isinstance(op, Attention)}
            )
    for (rank, phase, micro_batch), ops in want.items():
        if phase == "backward" and layout.recompute == "full":
            index = micro_batch % slices_of(layout)
            of_slice = shard_events(problem.setting, layout, slices_of(layout), index)
            ops.update(recomputed_in_programs_alone(layout_batch, rank, of_slice))
            # later slices see its keys and values, which therefore stay
            if index < slices_of(layout) - 1:
                ops.subtract(
                    {op: n for op, n in ops.items() if isinstance(op, Gemm) and op.n == 3 * HIDDEN}
                )
            ops.subtract(gathered_once_in_programs(layout_batch, rank))
    assert found == want


def recomputed_in_programs_alone(
    layout_batch: LayoutBatch, rank: int, events: ShardBlocks
) -> Counter[Op]:
    """Embedding and head are tagged as parts of the first and last layer, and are recomputed with
    them; so is the end of the last layer, which the head's norm needs. Frameworks, and so
    predictions, recompute layers alone."""
    found = Counter()
    embedding, layer, head = events.counts
    alone = np.zeros(len(events.ops))
    if rank == 0:
        alone += embedding[Phase.FORWARD]
    if rank == layout_batch.spec.stages - 1:
        alone += head[Phase.FORWARD] + layer[Phase.FORWARD] - layer[Phase.RECOMPUTE_FULL]
    for op, n in zip(map(canonical, events.ops), alone, strict=True):
        if op and n:
            found[op] += round(n)
    return found


def gathered_once_in_programs(layout_batch: LayoutBatch, rank: int) -> Counter[Op]:
    """Gathers that sequence parallelism repeats for a recomputed product and, in a prediction as in
    Megatron-LM, once more for its weight gradient; a program uses one for both."""
    events, found = layout_batch.composed[0].events, Counter()
    _, layer, head = events.counts
    counts = layout_batch.program.counts[rank].sum(axis=0)[1] * layer[Phase.RECOMPUTE_FULL]
    counts = counts + (head[Phase.FORWARD] if rank == layout_batch.spec.stages - 1 else 0.0)
    for op, n in zip(events.ops, counts, strict=True):
        if isinstance(op, Collective) and op.collective == "all_gather":
            found[op] += round(n)
    return found


def are_exchanged_alike(layout: Layout) -> bool:
    """Not where ZeRO shards gradients that sequence parallelism has sharded along the sequence
    already: those of the positions' table, which a prediction has whole on every rank."""
    return not (layout.zero and layout.effective_sequence_parallel)


@pytest.mark.parametrize(
    ("layout", "blocks"), [case for case in CASES if are_exchanged_alike(case[0])], ids=str
)
def test_gradients_and_weights_are_exchanged_alike(layout: Layout, blocks: Blocks) -> None:
    problem, layout_batch = composed(layout, model=with_blocks(blocks))
    found, want = (
        program_exchanges(distributed(layout, blocks), layout),
        composed_exchanges(problem, layout_batch),
    )
    if layout.zero == 3:
        # a program gathers what a backward pass reads; a prediction whole layers, as FSDP does
        for rank in range(layout.pp):
            (gathered,) = [key for key in want if key[:2] == (rank, "all_gather")]
            found[gathered] += (
                unread_bytes(layout, rank, blocks)
                * JOB.num_microbatches(layout)
                * slices_of(layout)
            )
    if layout.effective_sequence_parallel and layout.dp > 1:
        (reduced,) = [key for key in want if key[:2] == (0, "all_reduce")]
        found[reduced] += POSITION_BYTES - POSITION_BYTES // layout.tp
    if layout.zero >= 2 and slices_of(layout) > 1:
        # of the positions' gradient a slice has a part: a program reduces no more, and gathers the
        # parts to join them
        (reduced,) = [key for key in want if key[:2] == (0, "reduce_scatter")]
        found[reduced] += POSITION_BYTES * JOB.num_microbatches(layout) * (slices_of(layout) - 1)
        found[0, "all_gather", *reduced[2:]] -= POSITION_BYTES
    assert found == want


def slices_of(layout: Layout) -> int:
    return get_schedule(layout.schedule).slices


def unread_bytes(layout: Layout, rank: int, blocks: Blocks) -> int:
    """Bytes of the parameters of a rank that its backward passes do not read."""
    program = distributed(layout.replace(dp=1, zero=0), blocks)
    read = {n for i in program.function.instructions if i.tag.phase == "backward" for n in i.inputs}
    tensors = {
        p.value: program.types[p.value] for w in program.inputs_of("parameter") for p in w.pieces
    }
    return sum(
        t.n_bytes
        for name, t in tensors.items()
        if t.device == rank * layout.tp and name not in read
    )


@pytest.mark.parametrize("layout", EVERY, ids=str)
def test_messages_between_stages_are_the_same(layout: Layout) -> None:
    problem, layout_batch = composed(layout)
    structure, events = (
        prepared(layout_batch.spec).structure,
        bundle_events(problem, layout_batch, 0),
    )
    of_class: Counter[int] = Counter()
    for number, index in zip(*event_entries(structure, events), strict=True):
        op = list(events.ops)[index]
        if isinstance(op, Collective) and op.collective == "send_recv":
            # ranks that hold equal activations send a part each and gather; those of a program send
            # all of it
            whole = 1 if layout.effective_sequence_parallel else layout.tp
            of_class[int(number)] += round(op.bytes) * whole
    want: Counter[tuple[str, int]] = Counter()
    # a gather that its own pass issues waits for the same message as the pass
    there = structure.pred >= 0
    for _, number in set(
        zip(structure.pred[there].tolist(), structure.lag[there].tolist(), strict=True)
    ):
        if of_class[number]:
            phase = "forward" if structure.class_kind[number] == Kind.SEND_FORWARD else "backward"
            span = int(structure.class_span[number])
            want[phase, of_class[number] // span] += span
    program, found = distributed(layout, "none"), Counter()
    for instruction in program.function.instructions:
        sent = program.types[instruction.outputs[0]]
        if instruction.op == "send" and sent.device % (layout.devices // layout.pp) == 0:
            found[instruction.tag.phase, sent.n_bytes] += 1
    assert found == want


def is_timed_alike(layout: Layout) -> bool:
    """Whether the two sides mean the same step time by equal prices. They do not where

    - activations are recomputed, of which a program repeats more or less (see above);
    - gradients are reduced after every backward pass: a program does so before it sends the pass's
      results on;
    - sequences are sharded: a program exchanges and updates what of the positions' table belongs to
      a rank's tokens;
    - a pass computes two micro-batches: a program sends the first while it computes the second.
    """
    exchanges = (layout.zero >= 2 and layout.pp > 1) or (
        layout.effective_sequence_parallel and layout.dp > 1
    )
    return (
        layout.recompute == "none"
        and not exchanges
        and layout.schedule not in ("chimera-doubling", "chimera-halving")
    )


@pytest.mark.parametrize(
    ("layout", "blocks"), [case for case in CASES if is_timed_alike(case[0])], ids=str
)
def test_steps_take_as_long_at_the_same_prices(layout: Layout, blocks: Blocks) -> None:
    free = set[str]()
    # sums of replicated weights' gradients, which predictions leave out
    if layout.effective_sequence_parallel:
        free |= {"all_reduce", "adam"}
    # see `unread_bytes`, and what follows a message
    if layout.zero == 3 or (layout.pp > 1 and layout.tp > 1):
        free |= {"all_gather"}
    problem, layout_batch = composed(layout, frozenset(free), with_blocks(blocks))
    want = times(
        prepared(layout_batch.spec).structure, durations(problem, layout_batch)[0]
    ).makespan_s
    program = exchanging_on_compute(distributed(layout, blocks))
    assert makespan_s(program, free) == pytest.approx(want, rel=1e-12)
    # with several chunks a rank's messages, sent in the schedule's order, queue
    if layout_batch.spec.n_stages <= layout.pp:
        structure = program_structure(program.function, CLUSTER)
        found = simulate(structure, lambda ops: np.array([price_s(op, free) for op in ops]))
        assert found.makespan_s == pytest.approx(want, rel=1e-12)


def exchanging_on_compute(program: Program) -> Program:
    """The program with its exchanges between passes, as predictions have them where none
    overlaps."""
    moved = tuple(
        replace(i, tag=replace(i.tag, stream="compute")) if is_exchange(i) else i
        for i in program.function.instructions
    )
    return replace(program, function=replace(program.function, instructions=moved))


def makespan_s(program: Program, free: Collection[str]) -> float:
    """An event loop in which messages take no time and wait for nothing but what they carry."""
    ready_s: dict[str, float] = {}
    idle_s = [0.0] * program.n_devices
    priced_s = cache(partial(price_s, free=free))
    for instruction, group, work in works(program):
        end_s = max((ready_s.get(name, 0.0) for name in instruction.inputs), default=0.0)
        if instruction.op != "send":
            end_s = max(end_s, *(idle_s[device] for device in group)) + sum(map(priced_s, work))
            idle_s = [end_s if device in group else idle_s[device] for device in range(len(idle_s))]
        ready_s.update(dict.fromkeys(instruction.outputs, end_s))
    return max(idle_s)


@pytest.mark.parametrize(("layout", "blocks"), CASES, ids=str)
def test_model_states_take_the_same_bytes(layout: Layout, blocks: Blocks) -> None:
    problem, layout_batch = composed(layout, model=with_blocks(blocks))
    memory, program = bundle_memory(problem, layout_batch), distributed(layout, blocks)

    def held(role: str, values: Sequence[GlobalTensor]) -> list[int]:
        total = [0] * program.n_devices
        for tensor in {
            p.value: program.types[p.value] for w in values if w.role == role for p in w.pieces
        }.values():
            total[tensor.device] += tensor.n_bytes
        return total[:: layout.devices // layout.pp]

    assert held("parameter", program.inputs) == memory.weights[0].tolist()
    assert held("state", program.inputs) == memory.optimizer[0].tolist()
    if layout.zero != 1:  # returned as they were scattered for the update, accumulated whole
        gradients = memory.gradients[0].copy()
        # a program has of the positions' gradients those of a rank's tokens, unless it joins slices
        # of them
        if layout.effective_sequence_parallel and slices_of(layout) == 1:
            gradients[0] -= (POSITION_BYTES - POSITION_BYTES // layout.tp) / (
                layout.dp if layout.zero else 1
            )
        assert held("gradient", program.outputs) == gradients.tolist()


def test_sequence_parallelism_sums_gradients_that_predictions_leave_out() -> None:
    """Norms and the biases of row-parallel products see a rank's tokens alone: a program sums their
    gradients over the tensor-parallel ranks (as Megatron-LM does), a prediction neglects it."""
    program = distributed(Layout(tp=2, sequence_parallel=True), "none")
    found: Counter[str] = Counter()
    for instruction, group, work in works(program):
        if instruction.tag.phase == "update" and 0 in group:
            found.update(
                {
                    op.collective: round(op.bytes)
                    for op in work
                    if isinstance(op, Collective) and not is_of_loss(op)
                }
            )
    norms, biases = 2 * LAYERS + 1, 2 * LAYERS
    assert found == {"all_reduce": 4 * HIDDEN * (2 * norms + biases)}


@pytest.mark.parametrize(
    ("sequence_parallel", "forward", "backward"),
    [
        (False, {"all_reduce": 3}, {}),
        (True, {"all_reduce": 2, "reduce_scatter": 2}, {"all_gather": 1, "all_to_all": 2}),
    ],
)
def test_the_loss_is_reduced(
    sequence_parallel: bool, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Maximum, sum of exponentials and label's logit in both; under sequence parallelism a program
    goes on with a part of the tokens, a prediction (as Megatron-LM) with a part of the
    vocabulary."""
    layout = Layout(tp=2, sequence_parallel=sequence_parallel)
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for instruction, group, work in works(distributed(layout, "none")):
        for op in work:
            if (
                isinstance(op, Collective)
                and is_of_loss(op)
                and 0 in group
                and instruction.tag.micro_batch == 0
            ):
                found[instruction.tag.phase][op.collective] += 1
    assert found == {"forward": forward, "backward": backward}
    events = composed(layout)[1].composed[0].events
    small = [isinstance(op, Collective) and is_of_loss(op) for op in events.ops]
    assert events.counts[-1][:, small].sum(axis=1).tolist() == [3.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_as_many_micro_batches_are_in_flight(layout: Layout) -> None:
    """By live ranges of what the first norm of every stage makes, which its weight gradient is the
    last to use."""
    problem, layout_batch = composed(layout)
    function, types = distributed(layout, "none").function, distributed(layout, "none").types
    made: dict[tuple[int, int, int], tuple[int, str]] = {}
    last_use: dict[str, int] = {}
    for index, instruction in enumerate(function.instructions):
        last_use.update(dict.fromkeys(instruction.inputs, index))
        tag, (output, *_) = instruction.tag, instruction.outputs
        if instruction.op == "layer_norm" and tag.phase == "forward":
            made.setdefault((types[output].device, tag.layer, tag.micro_batch), (index, output))
    first_layers = np.flatnonzero(
        np.diff(default_stages(LAYERS, layout_batch.spec.n_stages), prepend=-1)
    )
    peak = []
    for rank in range(layout.pp):
        values = [made[key] for key in made if key[0] == rank and key[1] in first_layers]
        change = sorted(
            [(index, 1) for index, _ in values] + [(last_use[name], -1) for _, name in values]
        )
        peak.append(max(np.cumsum([by for _, by in change])) / slices_of(layout))
    assert peak == program_live(problem.setting, layout_batch.spec).activations.sum(axis=1).tolist()


@pytest.mark.parametrize("blocks", ["none", *PARALLEL])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_micro_batch_leaves_the_same_behind(
    tp: int, sequence_parallel: bool, recompute: str, blocks: Blocks
) -> None:
    """On a rank without embedding and head: what a forward pass makes and a backward pass uses."""
    layout = Layout(tp=tp, pp=4, sequence_parallel=sequence_parallel, recompute=recompute)  # pyright: ignore[reportArgumentType]
    _, layout_batch = composed(layout, model=with_blocks(blocks))
    function, types = distributed(layout, blocks).function, distributed(layout, blocks).types
    device, kept = tp, dict[str, int]()
    forward: set[str] = set()
    for instruction in function.instructions:
        if instruction.tag.micro_batch == 0 and instruction.tag.phase == "forward":
            forward.update(name for name in instruction.outputs if types[name].device == device)
        elif instruction.tag.micro_batch == 0 and instruction.tag.phase == "backward":
            kept.update(
                {name: types[name].n_bytes for name in instruction.inputs if name in forward}
            )
    want = layout_batch.saved_bytes[0, 1]
    # fused attention keeps a statistic per query and head, of which programs know nothing
    if recompute == "none":
        want -= 4 * SEQ_LEN * HEADS // tp * layout_batch.program.counts[1].sum()
    assert sum(kept.values()) == want


@pytest.mark.parametrize(("dp", "ep", "pp"), [(2, 2, 1), (4, 4, 1), (2, 2, 2), (4, 2, 1)])
def test_experts_exchange_tokens_alike(dp: int, ep: int, pp: int) -> None:
    """The same all-to-alls over the same ranks. A program's buffers take all tokens for every
    expert, so that none is dropped, and the buffers of data replicas are gathered before; a
    prediction sends each token to the expert it visits (one here)."""
    experts, layout = 4, Layout(dp=dp, ep=ep, pp=pp)
    size = replace(SIZE, layers=2, experts=experts)
    program = distribute(training_step(transformer_loss(size, BATCH)), Degrees.of(layout, BATCH))
    found: dict[str, Counter[Op]] = {"forward": Counter(), "backward": Counter()}
    for instruction, group, work in works(program):
        for op in work:
            first = 0 in group and instruction.tag.micro_batch <= 0
            if first and isinstance(op, Collective) and op.collective == "all_to_all":
                found[instruction.tag.phase][
                    replace(op, bytes=op.bytes / experts / (dp // ep))
                ] += 1
    routed = Experts(count=experts, topk=1, ffn_hidden=4 * HIDDEN)
    layout_batch = composed(layout, model=replace(MODEL, layers=2, experts=routed))[1]
    events, want = layout_batch.composed[0].events, dict[str, Counter[Op]]()
    for name, phase in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD_INPUT)):
        counts = layout_batch.program.counts[0].sum(axis=0) @ events.counts[:, phase]
        want[name] = Counter(
            {
                op: round(n)
                for op, n in zip(events.ops, counts, strict=True)
                if isinstance(op, Collective) and op.collective == "all_to_all"
            }
        )
    assert found == want
