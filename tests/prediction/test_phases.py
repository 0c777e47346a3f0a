"""How long the phases of a block last, against scalars added up one by one: what hides, what it
costs, what hosts take.

The package works on arrays of all blocks, phases and events at once; here each phase is a loop over
its events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log, sqrt
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.ops import Attention, Gemm
from perfmodel.prediction import EAGER, Site, block_times, shard_events, step_problem
from perfmodel.prediction.composition import Phase
from perfmodel.spec import Framework, Job, Layout

CHANNELS = 24
FAST_HOST = EAGER.replace(host_op_s=0.0, kernel_gap_s=0.0)


@dataclass
class Event:
    """A kernel or collective of one phase, with all its occurrences."""

    op: Any
    group: str
    count: float
    each_s: float
    overlappable: bool
    beside_attention: bool
    follows: bool
    hidden: float = 0.0
    """Share of its time that hides behind kernels."""

    @property
    def total_s(self) -> float:
        return self.count * self.each_s

    @property
    def is_kernel(self) -> bool:
        return self.group == ""

    @property
    def waits(self) -> bool:
        """A collective that the kernels after it wait for."""
        return not (self.is_kernel or self.overlappable or self.beside_attention)


@dataclass
class PhaseByHand:
    """One phase of one block."""

    table: Any
    framework: Framework
    layout: Layout
    device: Any
    block: int
    phase: int
    skew: float
    """Relative spread of the ranks' times for the same kernels."""

    def events_of(self, phase: int) -> list[Event]:
        table = self.table
        columns = (
            table.ops,
            table.groups,
            table.counts[self.block, phase].tolist(),
            table.times.time_s.tolist(),
        )
        flags = (
            table.overlappable.tolist(),
            table.beside_attention.tolist(),
            table.follows.tolist(),
        )
        events = [Event(*fields) for fields in zip(*columns, *flags, strict=True)]
        return [event for event in events if event.count > 0]

    def host_s(self, phase: int) -> float:
        """What the host takes to issue a phase; without graphs, checks and experts an operator for
        every event."""
        operators = sum(event.count for event in self.events_of(phase))
        if self.table.layers[self.block]:
            operators += {
                Phase.FORWARD: self.framework.host.forward_bookkeeping,
                Phase.BACKWARD_INPUT: self.framework.host.backward_bookkeeping,
            }.get(Phase(phase), 0.0)
        return operators * self.framework.host.issue_s

    def gaps_s(self, phase: int) -> float:
        return (
            sum(event.count for event in self.events_of(phase)) * self.framework.host.kernel_gap_s
        )

    def compute(self) -> "PhaseByHand":
        self.events = self.events_of(self.phase)
        weights = (
            self.events_of(Phase.BACKWARD_WEIGHT) if self.phase == Phase.BACKWARD_INPUT else []
        )
        beside = [event for event in (*self.events, *weights) if event.is_kernel]
        free_s = sum(event.total_s for event in beside)
        if self.phase == Phase.BACKWARD_INPUT:
            # while weight gradients wait for their host, the links are free
            busy_s = sum(event.total_s for event in weights)
            free_s += max(
                self.gaps_s(Phase.BACKWARD_WEIGHT), self.host_s(Phase.BACKWARD_WEIGHT) - busy_s
            )
        free_at_first_s = free_s
        attention_s = sum(event.total_s for event in beside if isinstance(event.op, Attention))

        around_attention = [event for event in self.events if event.beside_attention]
        free_s = self.hide(around_attention, min(attention_s, free_s), 1.0, free_s)
        independent = [event for event in self.events if event.overlappable]
        free_s = self.hide(independent, free_s, 1.0, free_s)
        if self.ring_steps > 1:
            self.hide(self.ring_collectives, free_s, self.most_in_rings(), free_s)
        lost_s = sum(event.total_s * self.lost_share(event) for event in beside)
        self.lost = lost_s / free_at_first_s if free_at_first_s else 0.0
        return self

    @property
    def ring_steps(self) -> int:
        return self.layout.tp if self.layout.overlap.tp_overlap else 1

    @property
    def ring_collectives(self) -> list[Event]:
        return [
            event
            for event in self.events
            if event.group == "tp" and event.waits and not event.follows
        ]

    def hide(self, collectives: list[Event], behind_s: float, most: float, free_s: float) -> float:
        """Hide collectives behind kernels that take so long, at most a share of them; what is left
        of the kernels."""
        total_s = sum(event.total_s for event in collectives)
        if total_s == 0:
            return free_s
        share = min(most, behind_s / total_s)
        for event in collectives:
            event.hidden = share
        return max(free_s - share * total_s, 0.0)

    def most_in_rings(self) -> float:
        """(1 - 1/n) min(1, product / collective), each collective beside the longest product that
        has none yet."""
        if not self.table.layers[self.block]:
            return 0.0
        collectives = ceil(sum(event.count for event in self.ring_collectives))
        if collectives == 0:
            return 0.0
        collective_s = sum(event.total_s for event in self.ring_collectives) / collectives
        products_s = [
            event.each_s
            for event in self.events
            if isinstance(event.op, Gemm) and event.op.op != "grouped_linear"
            for _ in range(floor(event.count))
        ]
        longest_s = sorted(products_s, reverse=True)[:collectives]
        shares = [min(1.0, product_s / collective_s) for product_s in longest_s]
        return (1 - 1 / self.ring_steps) * sum(shares) / collectives

    @property
    def held(self) -> float:
        return (
            min(CHANNELS / self.device.compute_units, 0.25)
            if self.framework.communication.contends
            else 0.0
        )

    def lost_share(self, event: Event) -> float:
        """A product that filled the device in one wave takes two beside a collective; others lose
        what it holds."""
        if not self.held:
            return 0.0
        if isinstance(event.op, Gemm):
            op = event.op
            tiles = op.batch * op.groups * ceil(op.m / 128) * ceil(op.n / 256)
            if (
                round(self.device.compute_units * (1 - self.held))
                < tiles
                <= self.device.compute_units
            ):
                return max(self.held, 0.5)
        return self.held

    def slowing(self, event: Event) -> float:
        """Seconds that kernels take longer beside a collective: never more than it saves to hide
        it."""
        if event.is_kernel:
            return 0.0
        if self.framework.communication.tp_overlap_copies and self.ring_steps > 1 and event.waits:
            return 0.0
        saved = event.hidden * (1 - self.framework.communication.tp_overlap_loss)
        return event.total_s * min(event.hidden * self.lost, saved)

    def exposed_s(self, event: Event) -> float:
        return event.total_s * (
            1 - event.hidden * (1 - self.framework.communication.tp_overlap_loss)
        )

    @property
    def slowed_s(self) -> float:
        return sum(self.slowing(event) for event in self.events)

    @property
    def waiting_s(self) -> float:
        """The last of n ranks is sqrt(2 ln n) spreads late: of hosts at each collective, of devices
        on all kernels."""
        meetings = [event for event in self.events if event.waits and not event.follows]
        if not meetings:
            return 0.0
        late = sum(event.count * sqrt(2 * log(event.op.num_ranks)) for event in meetings)
        kernels_s = sum(event.total_s for event in self.events if event.is_kernel)
        if self.phase == Phase.BACKWARD_INPUT:
            kernels_s += sum(
                event.total_s for event in self.events_of(Phase.BACKWARD_WEIGHT) if event.is_kernel
            )
        mean_late = late / sum(event.count for event in meetings)
        return (
            late * self.framework.communication.collective_skew_s
            + mean_late * self.skew * kernels_s
        )

    @property
    def busy_s(self) -> float:
        return sum(self.exposed_s(event) for event in self.events) + self.slowed_s + self.waiting_s

    @property
    def phase_s(self) -> float:
        host_s = self.host_s(self.phase) - (
            0.0 if self.framework.host.execution == "blocking" else self.busy_s
        )
        return self.busy_s + max(self.gaps_s(self.phase), host_s)

    def paired(self) -> "Paired":
        """Beside another pass alike: collectives hide behind its kernels, or kernels behind its
        collectives."""
        shown_s = sum(self.exposed_s(event) for event in self.events if not event.is_kernel)
        slowed_s = sum(
            min(self.slowing(event), self.held * (event.total_s - self.exposed_s(event)))
            for event in self.events
        )
        kernels_s = sum(event.total_s for event in self.events if event.is_kernel)
        gaps_s = self.gaps_s(self.phase)
        compute_s = kernels_s + self.waiting_s + slowed_s + gaps_s
        pair_slowed_s = self.held * min(compute_s, shown_s)
        outlasting_s = max(shown_s - compute_s, 0.0)
        beside_s = compute_s + outlasting_s + pair_slowed_s
        meanwhile_s = gaps_s if self.framework.host.execution == "blocking" else beside_s
        late_s = max(self.host_s(self.phase) - meanwhile_s, 0.0)
        return Paired(beside_s + late_s, outlasting_s, slowed_s + pair_slowed_s, gaps_s + late_s)


@dataclass
class Paired:
    """A phase of a pass that runs beside another pass, and what it consists of."""

    phase_s: float
    collective_s: float
    slowed_s: float
    gap_s: float


def phases_by_hand(
    layout: Layout,
    framework: Framework,
    cluster: str,
    model: str = "gpt3-6.7b",
    skew: float = 0.0,
    **job: Any,
) -> Iterator[tuple[Any, PhaseByHand]]:
    """Every phase of every block of a layout, with the table that the package makes."""
    machine = catalog.cluster(cluster)
    work = Job(**({"global_batch": 32, "seq_len": 2048} | job))
    problem = step_problem(catalog.model(model), machine, work, None, framework, Site(skew=skew))
    table = block_times(problem, layout)
    for block in range(len(table.blocks)):
        for phase in Phase:
            yield (
                table,
                PhaseByHand(table, framework, layout, machine.device, block, phase, skew).compute(),
            )


LAYOUTS = (
    Layout(),
    Layout(tp=4),
    Layout(tp=2, tp_overlap=True),
    Layout(tp=8, tp_overlap=True),
    Layout(tp=8, tp_overlap=True, sequence_parallel=True),
    Layout(tp=2, cp=2, tp_overlap=True, sequence_parallel=True),
    Layout(cp=4),
)
FRAMEWORKS = {
    "eager": EAGER,
    "fast host": FAST_HOST,
    "no contention": FAST_HOST.replace(contends=False),
    "lossy rings": FAST_HOST.replace(tp_overlap_loss=0.3),
    "copied rings": FAST_HOST.replace(tp_overlap_copies=True),
    "slow host": EAGER.replace(host_op_s=2e-4),
    "blocking host": EAGER.replace(execution="blocking"),
    "late hosts": EAGER.replace(collective_skew_s=1e-5),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-a100"])
def test_a_phase_lasts_as_long_as_its_events_show(framework: str, cluster: str) -> None:
    for layout in LAYOUTS:
        for table, by_hand in phases_by_hand(layout, FRAMEWORKS[framework], cluster, skew=0.02):
            at, which = (by_hand.block, by_hand.phase), f"{layout} {Phase(by_hand.phase).name}"
            assert table.waiting_s[at] == pytest.approx(by_hand.waiting_s), which
            assert table.slowed_s[at] == pytest.approx(by_hand.slowed_s), which
            assert table.phase_s[at] == pytest.approx(by_hand.phase_s), which
            paired = by_hand.paired()
            for name, seconds in vars(paired).items():
                assert getattr(table.paired, name)[at] == pytest.approx(seconds), (
                    f"{name} of {which}"
                )
            shown = paired.phase_s / by_hand.phase_s if by_hand.phase_s else 0.0
            assert (table.exposed_share(False)[at], table.exposed_share(True)[at]) == (
                1.0,
                pytest.approx(shown),
            ), which


@pytest.mark.parametrize(
    ("cluster", "tp", "outlasts"),
    [("dgx-a100", 2, True), ("dgx-a100", 4, True), ("l40s-x8", 4, False)],
)
def test_rings_hide_all_but_a_step_or_what_their_product_lasts(
    cluster: str, tp: int, outlasts: bool
) -> None:
    """(1 - 1/n) min(1, product / collective): products that outlast their collective, and links
    that are slower."""
    layout = Layout(tp=tp, tp_overlap=True, sequence_parallel=True)
    for table, by_hand in phases_by_hand(layout, FAST_HOST, cluster, "gpt3-175b"):
        if by_hand.phase == Phase.FORWARD and table.layers[by_hand.block]:
            rings = np.array([group == "tp" for group in table.groups]) & ~(
                table.follows | table.overlappable
            )
            hidden = (1 - table.exposed[by_hand.block, by_hand.phase, rings]).max()
            if outlasts:
                assert hidden == pytest.approx(1 - 1 / tp)
            else:
                assert 0 < hidden < 0.9 * (1 - 1 / tp)


@pytest.mark.parametrize(
    ("cluster", "dtype", "recipe", "casts"),
    [
        ("dgx-h100", "bf16", "", 0),
        ("dgx-h100", "fp8", "", 0),
        ("dgx-h100", "fp8", "delayed", 1),
        ("dgx-h100", "fp8", "current", 2),
        ("hgx-b200", "fp8", "mxfp8", 1),
        ("hgx-b200", "fp4", "nvfp4", 2),
    ],
)
def test_experts_are_launched_one_by_one_each_with_the_casts_of_its_operand(
    cluster: str, dtype: str, recipe: str, casts: int
) -> None:
    """A cast is one kernel, or two where a maximum is found first; weight gradients find their
    operands cast."""
    job = Job(global_batch=32, seq_len=2048, dtype=dtype, fp8_recipe=recipe)  # pyright: ignore[reportArgumentType]
    problem = step_problem(
        catalog.model("mixtral-8x7b"), catalog.cluster(cluster), job, None, EAGER
    )
    events = shard_events(problem.setting, Layout(dp=4, ep=4))
    grouped = [isinstance(op, Gemm) and op.op == "grouped_linear" for op in events.ops]
    assert events.further_launches[~np.array(grouped)].tolist() == [0.0] * grouped.count(False)
    passes = set()
    for op, further in zip(events.ops, events.further_launches.tolist(), strict=True):
        if isinstance(op, Gemm) and op.op == "grouped_linear":
            passes.add(op.pass_)
            assert op.groups == 2
            kernels = 1 if op.pass_ == "wgrad" else 1 + casts
            assert further == kernels * op.groups - 1, op
    assert passes == {"fwd", "dgrad", "wgrad"}


def test_contention_lengthens_a_phase_by_what_its_kernels_lose() -> None:
    layout = Layout(tp=8, tp_overlap=True)
    slowed = [
        table.slowed_s[by.block, by.phase]
        for table, by in phases_by_hand(layout, FAST_HOST, "dgx-h100")
    ]
    with_it, without = (
        [
            table.phase_s[by.block, by.phase]
            for table, by in phases_by_hand(layout, framework, "dgx-h100")
        ]
        for framework in (FAST_HOST, FRAMEWORKS["no contention"])
    )
    assert max(slowed) > 0
    np.testing.assert_allclose(np.array(with_it) - np.array(without), slowed, atol=1e-12)
