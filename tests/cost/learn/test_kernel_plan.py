"""Which measurements answer a request."""

import numpy as np
import pytest

from perfmodel.catalog import device
from perfmodel.cost.learn.plans import Plan, make_plan, on_behalf_of
from perfmodel.cost.learn.rows import KindCode, kind_distance, rows_from_ops, stand_in
from perfmodel.cost.learn.stack import Figures, Stack, similarity
from perfmodel.ops import Gemm, KernelKind

FWD, WGRAD = KernelKind("half", "linear", "fwd"), KernelKind("half", "linear", "wgrad")

kind_of = KernelKind.parse


def stack(
    name: str, software: str, kinds: tuple[KernelKind, ...], source: str = "lab", order: int = 0
) -> Stack:
    return Stack(Figures.of(device(name)), source, software, dict.fromkeys(kinds, 100), order=order)


STACKS = (
    stack("A100-SXM4-80GB", "torch", (FWD,)),
    stack("A100-SXM4-80GB", "trtllm-1", (FWD,), "aiconfigurator", order=1),
    stack("A40", "torch", (FWD, WGRAD)),
    stack("L4", "torch", (FWD,)),
)
OF_ONE_DIE = (
    stack("H100", "torch", (FWD, WGRAD)),
    stack("GH200", "torch", (FWD,)),
    stack("B200", "te", (FWD, WGRAD), "simumax"),
    stack("B300", "torch", (FWD,)),
)


def test_measured_kind_is_answered_directly() -> None:
    plan = make_plan(STACKS, Figures.of(device("A100-SXM4-80GB")), FWD, None, None)
    assert plan is not None
    assert plan.mode == "direct"
    assert plan.terms[0].stack == 0  # torch before a serving stack's own kernels


def test_named_software_is_used() -> None:
    plan = make_plan(STACKS, Figures.of(device("A100-SXM4-80GB")), FWD, None, "trtllm-1")
    assert plan is not None
    assert plan.terms[0].stack == 1


def test_missing_pass_is_a_ratio_of_the_nearest_device_that_has_both() -> None:
    plan = make_plan(STACKS, Figures.of(device("A100-SXM4-80GB")), WGRAD, None, None)
    assert plan is not None
    assert plan.mode == "ratio"
    assert [(t.coefficient, t.stack, t.kind) for t in plan.terms] == [
        (1.0, 0, FWD),
        (1.0, 2, WGRAD),
        (-1.0, 2, FWD),
    ]


ADD, NORM = KernelKind("half", "add", "fwd"), KernelKind("half", "norm", "fwd")


def plan_of_norm(*stacks: Stack) -> Plan:
    plan = make_plan(stacks, Figures.of(device("A100-SXM4-80GB")), NORM, None, None)
    assert plan is not None
    return plan


def test_another_op_in_other_software_tells_less_than_the_kind_on_the_same_silicon() -> None:
    plan = plan_of_norm(
        stack("A100-SXM4-80GB", "torch", (ADD,)),
        stack("A100-SXM4-40GB", "apex", (ADD, NORM), "other lab"),
        stack("L4", "torch", (NORM,)),
    )
    assert plan.mode == "sibling"
    assert [(t.coefficient, t.stack, t.kind) for t in plan.terms] == [(1.0, 1, NORM)]
    assert plan.terms[0].figures.name == "A100-SXM4-80GB"
    assert plan.terms[0].at.name == "A100-SXM4-40GB"


def test_the_same_kernel_on_the_die_goes_before_a_ratio() -> None:
    own, donor = stack("A100-SXM4-80GB", "torch", (ADD,)), stack("L4", "torch", (ADD, NORM))
    assert plan_of_norm(own, donor).mode == "ratio"
    terms = plan_of_norm(own, donor, stack("A100-SXM4-40GB", "apex", (NORM,), "other lab")).terms
    assert [(t.coefficient, t.stack, t.kind) for t in terms] == [(1.0, 2, NORM)]


@pytest.mark.parametrize("kind", [FWD, WGRAD])
def test_parts_of_a_die_are_answered_by_the_same_kernels(kind: KernelKind) -> None:
    for names in (("H100", "H200", "GH200", "H100-PCIE-80GB"), ("B200", "GB200", "B300", "GB300")):
        plans = [
            make_plan(OF_ONE_DIE, Figures.of(device(name)), kind, None, None) for name in names
        ]
        kernels = [
            {(t.coefficient, t.stack, t.kind, t.at.name) for t in plan.terms}
            for plan in plans
            if plan
        ]
        assert len(kernels) == len(names)
        assert all(one == kernels[0] for one in kernels)


def test_times_under_load_say_how_kernels_compare_but_not_how_fast_they_are() -> None:
    forward, gradient = (
        make_plan(OF_ONE_DIE, Figures.of(device("B200")), kind, None, None) for kind in (FWD, WGRAD)
    )
    assert forward is not None
    assert gradient is not None
    assert [t.stack for t in forward.terms] == [3]
    assert [(t.coefficient, t.stack, t.kind) for t in gradient.terms] == [
        (1.0, 3, FWD),
        (1.0, 2, WGRAD),
        (-1.0, 2, FWD),
    ]
    named = make_plan(OF_ONE_DIE, Figures.of(device("B200")), FWD, "simumax", "te")
    assert named is not None
    assert [t.stack for t in named.terms] == [2]


def test_unmeasured_device_leans_on_its_relatives() -> None:
    plan = make_plan(STACKS, Figures.of(device("A10")), FWD, "lab", "torch")
    assert plan is not None
    assert plan.mode == "near"
    assert sum(t.coefficient for t in plan.terms) == pytest.approx(1.0)
    weights = {STACKS[t.stack].figures.name: t.coefficient for t in plan.terms}
    assert weights["A40"] > weights["L4"]
    assert all(t.figures.name == t.at.name == "A10" for t in plan.terms)


def test_other_vendor_is_far() -> None:
    plan = make_plan(STACKS, Figures.of(device("MI250")), FWD, None, None)
    assert plan is not None
    assert plan.mode == "far"


def test_no_stack_no_plan() -> None:
    assert (
        make_plan(STACKS, Figures.of(device("L4")), KernelKind("fp8", "linear", "fwd"), None, None)
        is None
    )


def test_similarity_is_symmetric_and_one_for_equals() -> None:
    a, b = Figures.of(device("H100")), Figures.of(device("H200-SXM-141GB"))
    assert similarity(a, a, "half") == 1.0
    assert similarity(a, b, "half") == pytest.approx(similarity(b, a, "half"))
    assert similarity(a, b, "half") > similarity(a, Figures.of(device("L4")), "half")


def test_memory_size_alone_makes_no_other_kernels() -> None:
    a, b = Figures.of(device("V100-SXM2-32GB")), Figures.of(device("V100"))
    assert a.same_kernels(b)
    assert not a.same_kernels(Figures.of(device("V100-PCIE-32GB")))


def test_stand_in_prefers_pass_then_likeness() -> None:
    known = [
        kind_of("half/gelu/bwd"),
        kind_of("half/gelu/fwd"),
        kind_of("half/layer_norm/bwd"),
        kind_of("fp32/silu/bwd"),
    ]
    assert stand_in(kind_of("half/silu/bwd"), known) == kind_of("half/gelu/bwd")
    assert stand_in(kind_of("half/rms_norm/bwd"), known) == kind_of("half/layer_norm/bwd")
    assert stand_in(kind_of("half/gelu/fwd"), known) == kind_of("half/gelu/fwd")
    assert kind_distance(WGRAD, FWD) < kind_distance(WGRAD, kind_of("half/bmm/wgrad"))


def test_a_gradient_of_a_product_is_a_product() -> None:
    """Never both gradients, nor their addition to others, stand in for one; nor one for both,
    unless nothing else."""
    known = [KernelKind("fp32", "linear", p) for p in ("bwd", "bwd_one_gemm", "fwd", "grad_accum")]
    for gradient in ("dgrad", "wgrad"):
        assert stand_in(KernelKind("fp32", "linear", gradient), known) == kind_of("fp32/linear/fwd")
        assert (
            stand_in(
                KernelKind("half", "linear", gradient),
                [kind_of("half/linear/bwd"), kind_of("half/linear/grad_accum"), FWD],
            )
            == FWD
        )
    assert stand_in(kind_of("fp32/linear/bwd"), known[1:]) == kind_of("fp32/linear/fwd")


def test_a_stand_in_does_the_work_of_what_was_asked() -> None:
    plan = make_plan(STACKS, Figures.of(device("A100-SXM4-80GB")), FWD, None, None)
    assert plan is not None
    moved = on_behalf_of(plan, FWD, KernelKind("half", "linear", "dgrad"))
    assert moved.mode == "ratio"
    assert {(t.kind, t.work) for t in moved.terms} == {(FWD, KernelKind("half", "linear", "dgrad"))}
    assert on_behalf_of(plan, FWD, FWD) is plan


def test_a_source_that_nobody_measured_says_nothing() -> None:
    figures = Figures.of(device("A100-SXM4-80GB"))
    for kind in (FWD, WGRAD):
        asked = make_plan(STACKS, figures, kind, "my own cluster", "torch 9")
        assert asked == make_plan(STACKS, figures, kind, None, None)
    full = make_plan(STACKS, figures, FWD, None, "aiconfigurator/trtllm-1")
    assert full == make_plan(STACKS, figures, FWD, "aiconfigurator", "trtllm-1")


def test_one_hot_ignores_unknown_parts() -> None:
    code = KindCode.of([FWD, WGRAD])
    assert code.one_hot(FWD).sum() == 3
    assert code.one_hot(KernelKind("half", "bmm", "fwd")).sum() == 2


def test_a_kind_reads_as_it_is_written() -> None:
    assert KernelKind.parse(str(WGRAD)) == WGRAD
    assert str(WGRAD) == "half/linear/wgrad"


def test_rows_name_each_kind_once_and_no_other() -> None:
    rows = rows_from_ops(
        [Gemm(m=8, n=8, k=8, pass_=p, dtype=d) for p in ("fwd", "wgrad") for d in ("bf16", "fp16")]
    )
    assert rows.kinds == (FWD, WGRAD)
    assert rows.kind.tolist() == [0, 0, 1, 1]
    assert rows.take(np.array([3, 2])).kinds == (WGRAD,)
    assert rows.changed({}, pass_="fwd").kinds == (FWD,)
