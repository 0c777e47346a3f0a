"""Laws of hardware and of work that any step obeys, whatever the model, cluster, framework and
layout."""

from dataclasses import replace

import pytest
from drawn_cases import (
    Case,
    assert_between,
    cases,
    some,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import has_power_law
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout, Transformer

FACTORS = st.sampled_from([1.1, 2.0, 8.0])


# --- hardware -------------------------------------------------------------------------------------


@some(5)
@given(cases(), FACTORS)
def test_more_bandwidth_is_never_slower_and_no_faster_than_in_proportion(
    case: Case, times: float
) -> None:
    for level in range(len(case.cluster.levels)):
        assert_between(case.with_link(level, bandwidth=times), case, most=times)


@some(5)
@given(cases(), FACTORS)
def test_more_latency_is_never_faster_and_no_slower_than_in_proportion(
    case: Case, times: float
) -> None:
    for level in range(len(case.cluster.levels)):
        assert_between(case, case.with_link(level, latency=times), most=times)


@some(5)
@given(cases(), st.sampled_from([1.1, 2.0]))
def test_a_higher_peak_is_never_slower_and_no_faster_than_in_proportion(
    case: Case, times: float
) -> None:
    assert_between(case.with_peak(times), case, most=times)


@some(5)
@given(cases(), st.sampled_from([1.1, 1.4, 2.0]))
def test_faster_memory_is_never_slower_and_no_faster_than_in_proportion(
    case: Case, times: float
) -> None:
    assert_between(case.with_memory_bandwidth(times), case, most=times)


@some(5)
@given(cases())
def test_twice_of_everything_is_at_most_twice_as_fast(case: Case) -> None:
    # The power limit is not doubled. Where it binds, products wait for a share that is worked out
    # for the model's passes on a full device, and a layout's own mix of kernels differs from these
    # a little.
    least = 0.99 if has_power_law(case.cluster.device) else 1.0
    assert_between(case.with_twice_of_everything(), case, most=2.0, least=least)


SAME_DIE = [
    ("H100-SXM5-80GB", "H200-SXM-141GB"),
    ("H100-SXM5-80GB", "GH200-96GB"),
    ("H200-SXM-141GB", "GH200-144GB"),
    ("A100-SXM4-40GB", "A100-SXM4-80GB"),
    ("B200-SXM-180GB", "GB200-NVL72"),
    ("B200-SXM-180GB", "B300-SXM"),
    ("GB200-NVL72", "GB300-NVL72"),
    ("H800-SXM5-80GB", "H100-SXM5-80GB"),
    ("H100-PCIE-80GB", "H100-SXM5-80GB"),
    ("MI300X", "MI325X"),
    ("MI350X", "MI355X"),
    ("V100-SXM2-16GB", "V100-SXM2-32GB"),
]


@pytest.mark.parametrize(("slower", "faster"), SAME_DIE)
@some(3)
@given(case=cases(), together=st.booleans())
def test_devices_of_one_die_differ_by_no_more_than_their_figures(
    slower: str, faster: str, case: Case, together: bool
) -> None:
    assert_differ_by_their_figures(slower, faster, case, together)


@some(2)
@given(case=cases(), together=st.booleans())
def test_experts_on_one_of_two_packages_of_blackwell_differ_by_no_more_than_these(
    case: Case, together: bool
) -> None:
    """Mixtral on a GB200 and a B200: a tenth more rate, multiprocessors and power, of one die."""
    mixtral = replace(case, model=replace(catalog.model("mixtral-8x7b"), layers=4))
    assert_differ_by_their_figures("B200-SXM-180GB", "GB200-NVL72", mixtral, together)


def assert_differ_by_their_figures(slower: str, faster: str, case: Case, together: bool) -> None:
    one, other = catalog.device(slower), catalog.device(faster)
    figures = ("memory_bandwidth_bytes_per_s", "power_w", "clock_hz", "compute_units", "l2_bytes")
    rates = [(getattr(other, name), getattr(one, name)) for name in figures]
    rates += [(rate, getattr(one.peak, name)) for name, rate in vars(other.peak).items()]
    ratios = [1.0, *(a / b for a, b in rates if a and b)]
    dtype = case.dtype if case.dtype in one.dtypes else "bf16"
    alone = Layout(micro_batch=case.layout.micro_batch, recompute=case.layout.recompute)
    layout = alone.replace(tp=2, dp=4) if together else alone
    on_one, on_other = (
        replace(case, dtype=dtype, layout=layout, cluster=replace(case.cluster, device=d))
        for d in (one, other)
    )
    assert_between(on_other, on_one, most=1.01 * max(ratios), least=0.99 * min(ratios))


@some(5)
@given(cases())
def test_eight_bits_take_between_half_and_all_of_the_time_of_sixteen(case: Case) -> None:
    """By kernels of attention that both have, with whichever recipe of floats."""
    framework = case.framework.replace(
        fp8_flash_attention=case.framework.default_job.kernels.flash_attention
    )
    if {"fp8", "bf16"} <= set(case.cluster.device.dtypes):
        alike = replace(case, framework=framework)
        # casts hide no ring steps, products do
        for one in (
            alike,
            alike.laid(tp=2, tp_overlap=True),
        ):
            assert_between(replace(one, dtype="fp8"), replace(one, dtype="bf16"), most=2.0)


@some(6)
@given(cases(), st.sampled_from([("int8", "bf16"), ("tf32", "fp32"), ("fp32", "fp64")]))
def test_narrower_elements_are_never_slower(case: Case, pair: tuple[str, str]) -> None:
    narrow, wide = pair
    if set(pair) <= set(case.cluster.device.dtypes):
        assert_between(replace(case, dtype=narrow), replace(case, dtype=wide))


@pytest.mark.parametrize("tokens", [512, 2048])
def test_casts_that_no_recipe_names_pay_beside_ring_steps_too(tokens: int) -> None:
    """Shorter products hide less of the collectives that they are cut into, which casts do not."""
    layout = Layout(tp=4, dp=2, micro_batch=8, sequence_parallel=True, tp_overlap=True)
    case = Case(
        model=catalog.model("gpt3-125m"),
        cluster=catalog.cluster("dgx-h100"),
        layout=layout,
        rounds=1,
        framework=catalog.framework("megatron-deepspeed@2023"),
        seq_len=tokens,
        dtype="fp8",
    )
    assert not case.job.narrow.fp8_recipe
    assert_between(case, replace(case, dtype="bf16"), most=2.0)


# --- work -----------------------------------------------------------------------------------------


@some(5)
@given(cases())
def test_twice_the_micro_batches_take_longer_and_at_most_twice_as_long(case: Case) -> None:
    """But by nF1B, of whose mini-batches fewer are in flight the larger they are."""
    if case.layout.schedule != "nf1b":
        assert_between(case, replace(case, rounds=2 * case.rounds), most=2.0)


@some(5)
@given(cases())
def test_micro_batches_of_twice_the_size_take_longer_and_at_most_twice_as_long(case: Case) -> None:
    """Element-wise kernels alone may find their operands in the cache for the smaller size. Softmax
    is fused over multiples of four matrices, so that fewer of them may take more launches."""
    if isinstance(case.model, Transformer):
        assume(case.model.heads // case.layout.tp * case.layout.micro_batch % 4 == 0)
    assert_between(case, case.laid(micro_batch=2 * case.layout.micro_batch), most=2.05)


@some(5)
@given(cases())
def test_twice_the_length_takes_longer_and_at_most_four_times_as_long(case: Case) -> None:
    assert_between(case, replace(case, seq_len=2 * case.seq_len), most=4.0)


def _stages(layout: Layout) -> int:
    """Parts of the model that a layout's pipeline cuts it into."""
    scheduler = get_schedule(layout.effective_schedule)
    return int(scheduler.stage_map(layout.pp, scheduler.chunks_for(layout.vpp)).max()) + 1


@some(5)
@given(cases())
def test_twice_the_layers_take_longer_and_at_most_twice_as_long(case: Case) -> None:
    if isinstance(case.model, Transformer) and not case.model.decoder_layers:
        experts = case.model.experts
        if experts:
            experts = replace(experts, first_dense_layers=2 * experts.first_dense_layers)
        try:
            deeper = replace(case.model, layers=2 * case.model.layers, experts=experts)
        except ValueError:
            return  # layers of several kinds, each of its own number
        twice = replace(case, model=deeper)
        assert_between(case, twice)
        # of layers that stages cannot share evenly, some stage may have more than twice as many: no
        # stage has more than twice what the largest of a few has, as all have where layers are
        # filled up to a multiple of the stages
        stages = _stages(case.layout)
        even = replace(case.model, layers=-(-case.model.layers // stages) * stages)
        assert_between(replace(case, model=even), twice, least=0.0, most=2.0)


@some(5)
@given(cases())
def test_what_is_recomputed_takes_time_and_no_more_than_a_forward(case: Case) -> None:
    none, part, full = (case.laid(recompute=what) for what in ("none", "selective", "full"))
    assert_between(none, part)
    assert_between(part, full)
    # unit-time orders leave longer bubbles where passes are not as they assume
    assert_between(
        none, full, most=1.7 if case.layout.schedule in ("1f1b", "gpipe", "zb-h1") else 2.0
    )
