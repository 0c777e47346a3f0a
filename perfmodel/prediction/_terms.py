"""Terms that a training step adds to its kernels and collectives; each can be switched off.

A term is carried by fields of the records that a prediction starts from, which have values that add
nothing. Off means these values: the physics has no switches of its own, and a prediction without a
term goes through the same stages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from perfmodel.errors import UnknownNameError
from perfmodel.prediction._problem import StepProblem

_Off = Callable[[StepProblem], StepProblem]


@dataclass(frozen=True)
class StepTerm:
    """A cost of a step beyond isolated kernels and collectives."""

    name: str
    """Name in plain words."""
    off: _Off
    """The problem with values at which the term adds nothing; equal to the problem if it has these
    values already."""


def _framework(**neutral: Any) -> _Off:
    return lambda problem: replace(problem, framework=problem.framework.replace(**neutral))


def _job(**neutral: Any) -> _Off:
    return lambda problem: replace(problem, job=replace(problem.job, **neutral))


def _site(**neutral: Any) -> _Off:
    return lambda problem: replace(problem, site=replace(problem.site, **neutral))


def _levels(**neutral: Any) -> _Off:
    def off(problem: StepProblem) -> StepProblem:
        levels = tuple(replace(level, **neutral) for level in problem.cluster.levels)
        return replace(problem, cluster=replace(problem.cluster, levels=levels))

    return off


def _both_off(first: _Off, second: _Off) -> _Off:
    return lambda problem: second(first(problem))


def _fused_quantisation(problem: StepProblem) -> StepProblem:
    # Jobs in 16 bits cast nothing, and refuse a recipe.
    narrow = problem.job.dtype in ("fp8", "fp4") or problem.job.narrow.fp8_recipe
    return _job(fp8_recipe="fused")(problem) if narrow else problem


def _whole_rows(problem: StepProblem) -> StepProblem:
    if problem.job.kernels.row_kernels == "by_reduction":
        return _job(row_kernels="generated")(problem)
    return problem


STEP_TERMS: Final = (
    StepTerm("clock under load", _site(sustained=(), power_limited=False)),
    StepTerm("older attention kernels", _framework(attention="fastest")),
    StepTerm("products that nobody tuned", _framework(tuned_products=True)),
    StepTerm("unfused kernels", _job(eager_kernels=())),
    StepTerm("kernels that end at reductions", _whole_rows),
    StepTerm("loss apart from its gradient", _job(loss_with_gradient=True)),
    StepTerm("quantised operands", _fused_quantisation),
    StepTerm("waiting for the host", _framework(host_op_s=0.0)),
    StepTerm(
        "bookkeeping of the host",
        _framework(
            forward_bookkeeping=0,
            backward_bookkeeping=0,
            routing_forward_bookkeeping=0,
            routing_backward_bookkeeping=0,
        ),
    ),
    StepTerm("expert products launched one by one", _framework(grouped_launch_s=0.0)),
    StepTerm("hosts that wait for every kernel", _job(blocking_launches=False)),
    StepTerm("gaps between kernels", _framework(kernel_gap_s=0.0)),
    StepTerm(
        "kernels slowed by communication",
        _framework(contends=False, tp_overlap_loss=0.0, dp_overlap_loss=0.0),
    ),
    StepTerm(
        "waiting for the slowest rank",
        _both_off(_framework(straggling=0.0, collective_skew_s=0.0), _site(skew=0.0)),
    ),
    StepTerm("hosts that check collectives", _framework(checks_collectives="never")),
    StepTerm("transfers that hold up their sender", _framework(blocking_sends=False)),
    StepTerm(
        "waiting for the busiest experts", _job(expert_imbalance=1.0, expert_capacity_factor=None)
    ),
    StepTerm("modules recomputed", _job(recompute_modules=())),
    StepTerm("gradients reduced on all ranks", _job(all_reduce_gradients=False)),
    StepTerm("weight shards copied one by one", _framework(partition_copy_s=0.0)),
    StepTerm("updates by the host", _framework(host_updates_per_s=inf)),
    StepTerm("contention in the network", _levels(contention=0.0, rank_latency_s=0.0)),
    StepTerm("network at scale", _levels(slows_at_scale=False)),
    StepTerm("overhead of a step", _framework(step_overhead_s=0.0)),
)
"""All terms. A new term needs an entry here and the field that carries it."""
_BY_NAME: Final = {term.name: term for term in STEP_TERMS}


def without(problem: StepProblem, names: Iterable[str]) -> StepProblem:
    """The problem with some of `STEP_TERMS` switched off.

    Raises:
        UnknownNameError: no such term.
    """
    for name in names:
        if name not in _BY_NAME:
            raise UnknownNameError("term", name, tuple(_BY_NAME))
        problem = _BY_NAME[name].off(problem)
    return problem
