"""What a donor's constants become on a device that was not measured."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.catalog import device
from perfmodel.cost.learn.parameters import Parameters, term_constants
from perfmodel.cost.learn.plans import Term, make_plan
from perfmodel.cost.learn.stack import Figures, Stack, product
from perfmodel.ops import KernelKind

KIND = KernelKind("fp32", "add", "fwd")
A100, V100, T4 = (Figures.of(device(name)) for name in ("A100-PCIE-40GB", "V100-PCIE-32GB", "T4"))


def fitted(
    share: float, kind: KernelKind, host_launch: bool = False
) -> tuple[Parameters, tuple[Stack, ...], tuple[tuple[int, str], ...]]:
    """Two stacks with launch floors of 20 and 45 us and one share of the bandwidth."""
    stacks = tuple(Stack(f, "lab", "torch", {kind: 100}, host_launch) for f in (A100, V100))
    constants = [np.log(np.full(2, v)) for v in (3e-6, 0.6, share)] + [
        np.log(np.array([20e-6, 45e-6]))
    ]
    empty = np.zeros(0)
    params = Parameters(*constants, empty, empty, empty, empty, (), (), empty, (), empty, empty)
    return params, stacks, ((0, kind), (1, kind))


def constants_on(
    figures: Figures, share: float, kind: KernelKind = KIND, host_launch: bool = True
) -> Parameters:
    params, stacks, groups = fitted(share, kind, host_launch)
    return term_constants(params, stacks, groups, [Term(1.0, 0, kind, figures)])


def test_own_device_keeps_its_constants() -> None:
    own = constants_on(A100, 0.1)
    assert np.exp(own.log_floor_s) == pytest.approx([20e-6])
    assert np.exp(own.log_memory) == pytest.approx([0.1])


def test_launch_floor_of_another_device_is_that_of_the_source() -> None:
    assert np.exp(constants_on(T4, 0.8).log_floor_s) == pytest.approx([30e-6])
    assert np.exp(constants_on(T4, 0.8, host_launch=False).log_floor_s) == pytest.approx([20e-6])


def test_only_unfused_kernels_far_from_the_bandwidth_follow_the_issue_rate() -> None:
    unfused = KernelKind("half", "norm_unfused", "fwd")
    assert np.exp(constants_on(T4, 0.1).log_memory) == pytest.approx([0.1])
    assert np.exp(constants_on(T4, 0.8, kind=unfused).log_memory) == pytest.approx([0.8])
    slower = T4.units * T4.clock / (A100.units * A100.clock) / (T4.bandwidth / A100.bandwidth)
    assert np.exp(constants_on(T4, 0.1, kind=unfused).log_memory) == pytest.approx(
        [0.1 * slower**0.75]
    )


def test_another_version_is_trusted_more_than_other_software() -> None:
    assert product("trtllm-1.0.0") == product("trtllm-1.3.0rc20") == "trtllm"
    assert product("torch2.1.0-cu121") == "torch"
    a, b = (
        replace(fitted(0.8, KIND)[1][1], software=name) for name in ("vllm-0.24.0", "trtllm-1.3.0")
    )
    plan = make_plan((a, b), T4, KIND, "lab", "trtllm-1.0.0")
    assert plan is not None
    assert [t.stack for t in plan.terms] == [1]
