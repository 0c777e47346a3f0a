"""Explains why a request cannot be met, and finds the nearest changes that make it possible."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import ceil, floor, log10
from typing import Any, Final

from perfmodel.errors import LayoutError, Rejection, plain_text
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._enumerate import enumerate_grids
from perfmodel.planning.layouts._executor import Executor
from perfmodel.planning.layouts._objective import Goal, Objective
from perfmodel.planning.layouts._pricing import price
from perfmodel.planning.layouts._quantities import NAMES
from perfmodel.planning.layouts._space import SearchSpace, default_space, with_options
from perfmodel.planning.layouts.evaluation import fastest
from perfmodel.planning.layouts.expressions import Constraint, Expression
from perfmodel.planning.layouts.questions import Question
from perfmodel.prediction.memory import peak_memory
from perfmodel.units import GIB, number_of

MULTIPLES: Final = (2, 3, 4, 6, 8, 16, 32)
"""Multiples of the number of devices that are tried."""
NEAR: Final = 64
"""Device counts and batches up to this distance are tried if no layout divides them."""


@dataclass(frozen=True)
class Change:
    """One change that alone makes the request possible."""

    what: str
    """The change in words."""
    to: dict[str, Any]
    """New values by name."""

    def __str__(self) -> str:
        return plain_text(self.what)


@dataclass(frozen=True)
class Impossible:
    """A request that no layout meets, with the obstacle and changes that would help."""

    binding: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        binding = plain_text(self.binding)
        if not self.changes:
            return f"{binding}; changing only the devices, the memory, the options or the constraints does not help"
        return f"{binding}; it would be possible with {', or '.join(map(str, self.changes))}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "binding": self.binding,
            "changes": [{"what": c.what, "to": c.to} for c in self.changes],
        }


def nothing_divides(
    question: Question, error: LayoutError, rejected: Iterable[Rejection]
) -> Impossible:
    """Explain why no layout of the space is valid, and suggest what to leave free and the nearest
    devices and batch.

    Args:
        question: the question that has no layout.
        error: the error that the search met.
        rejected: why combinations were left out; only what their reasons name (`Reason.frees`) is
            changed.
    """
    if error.rejection:
        rejected = [*rejected, error.rejection]

    # Each reason names the fields whose release could help. Only these are tried, and each is
    # proved to help before it is suggested.
    named: set[str] = set()
    for rejection in rejected:
        named.update(rejection.reason.frees)
    freed = [name for name in _restricted(question) if name in named]
    changes = [_freed(question, name) for name in freed if _possible(_with_default(question, name))]
    if "framework" in named and _possible(question.beyond_framework):
        label = question.problem.framework.label
        changes.append(Change(f"another framework than {label}", {"any_framework": True}))

    # The nearest number of devices, and the nearest batch, for which a layout exists.
    if "devices" in named:
        capacity = question.problem.cluster.capacity
        for n in _around(min(question.devices, capacity + 1), capacity):
            if _possible(_on_devices(question, n)):
                changes.append(Change(f"{number_of(n, 'device')}", {"devices": n}))
                break
    if "global_batch" in named:
        global_batch = question.problem.job.global_batch
        for n in _around(global_batch, global_batch + NEAR):
            if _possible(_with_other_devices(question, question.with_problem(global_batch=n))):
                changes.append(Change(f"a global batch of {n}", {"global_batch": n}))
                break
    return Impossible(str(error), tuple(changes))


def nothing_fits(question: Question, candidates: Candidates) -> Impossible:
    """Explain why no layout fits into memory, and how much memory, how many devices or which
    options would be enough."""
    layout, need = candidates.smallest
    smallest = question.problem.notation(layout)
    _, (largest,) = peak_memory(question.step_problem, [layout])
    binding = (
        f"memory: no layout fits; the smallest, {smallest}, needs {need / GIB:.1f} GiB on its fullest device "
        f"(mostly {largest}), but only {question.step_problem.usable_bytes / GIB:.1f} GiB are usable"
    )

    # The smallest layout and the share of memory that the framework leaves free.
    enough = question.step_problem.framework.memory.memory_to_hold(need)
    changes = [
        Change(
            f"{_rounded_up(enough / GIB)} GiB per device",
            {"memory_bytes": _rounded_up(enough / GIB) * GIB},
        )
    ]
    changes += [
        _freed(question, name)
        for name in _restricted(question)
        if _fits(_with_default(question, name))
    ]

    # Options that save memory help training alone; copies to the host need a link to it.
    options = []
    if question.problem.job.mode == "train":
        options.append("recompute")
        if question.problem.cluster.device.host_bandwidth_bytes_per_s is not None:
            options.append("offload")
    for name in options:
        if _fits(
            replace(question, space=with_options(question.space, name, question.problem.cluster))
        ):
            changes.append(Change(f"--options {name}", {"options": name}))
    for k in MULTIPLES:
        n = k * question.devices
        if n <= question.problem.cluster.capacity and _fits(_on_devices(question, n)):
            changes.append(Change(f"{number_of(n, 'device')}", {"devices": n}))
            break
    return Impossible(binding, tuple(changes))


def nothing_satisfies(question: Question, goal: Goal, executor: Executor) -> Impossible:
    """Explain why no layout that fits satisfies the constraints, and how to loosen them.

    A constraint's nearest possible threshold is the least violation of it by layouts that satisfy
    all others, which is a search of its own.

    Raises:
        LayoutError: there is no constraint, so that the objective itself has no value.
    """
    if not goal.constraints:
        raise LayoutError(
            f"search: no layout that fits has a finite value of the objective {goal.objective.name!r}; change it"
        )
    changes = list(_loosened_constraints(question, goal, executor))
    together: Sequence[Constraint] = goal.constraints
    contradiction = () if changes else _smallest_contradiction(question, goal, executor)
    if contradiction:
        together = contradiction
        names = [str(constraint) for constraint in contradiction]
        changes.append(Change(f"neither {' nor '.join(names)}", {"without": names}))

    # Fewer devices cost less and need less energy, so that they may satisfy constraints that all
    # devices cannot.
    if not question.space.fewer_devices and {"tp", "pp", "ep"}.isdisjoint(_restricted(question)):
        default = default_space(question.problem, fewer_devices=True)
        degrees = {"tp": default.tp, "pp": default.pp, "ep": default.ep}
        free = replace(question, space=replace(question.space, fewer_devices=True, **degrees))
        possible = fastest(free, goal, executor)
        if possible:
            notation = question.problem.notation(possible.layout)
            changes.append(Change(f"--fewer-devices, by {notation}", {"fewer_devices": True}))
    changes += _with_more_devices(question, goal, executor)
    verb = "cannot be satisfied" if len(together) == 1 else "cannot be satisfied together"
    return Impossible(f"layouts fit, but {' and '.join(map(str, together))} {verb}", tuple(changes))


def _loosened_constraints(question: Question, goal: Goal, executor: Executor) -> Iterator[Change]:
    """Loosen each constraint until some layout meets it together with all the others."""
    for number, constraint in enumerate(goal.constraints):
        remaining = goal.constraints[:number] + goal.constraints[number + 1 :]
        least_violation = replace(goal, objective=_violation(constraint), constraints=remaining)
        relaxed = fastest(question, least_violation, executor)
        if relaxed:
            text = _loosened(constraint, relaxed.value)
            notation = question.problem.notation(relaxed.layout)
            yield Change(f"{text} (for {constraint}), by {notation}", {"constraint": text})


def _smallest_contradiction(
    question: Question, goal: Goal, executor: Executor
) -> tuple[Constraint, ...]:
    """The smallest set of several constraints without which a layout satisfies the rest; empty if
    there is none."""
    for count in range(2, len(goal.constraints) + 1):
        for dropped in combinations(goal.constraints, count):
            remaining = tuple(
                constraint for constraint in goal.constraints if constraint not in dropped
            )
            if fastest(question, replace(goal, constraints=remaining), executor):
                return dropped
    return ()


def _with_more_devices(question: Question, goal: Goal, executor: Executor) -> list[Change]:
    """The least multiple of the devices on which some layout meets all constraints, if any."""
    # More devices shorten the step. Each multiple needs a separate search, so only small ones are
    # tried.
    for k in MULTIPLES[:5]:
        n = k * question.devices
        if n > question.problem.cluster.capacity:
            break
        try:
            possible = fastest(_on_devices(question, n), goal, executor)
        except LayoutError:
            continue
        if possible:
            notation = question.problem.notation(possible.layout)
            return [Change(f"{number_of(n, 'device')}, by {notation}", {"devices": n})]
    return []


def _violation(constraint: Constraint) -> Objective:
    """Return the amount by which a constraint is not satisfied, as an objective."""
    lhs, rhs = constraint.lhs.text, constraint.rhs.text
    excess, shortfall = f"({lhs}) - ({rhs})", f"({rhs}) - ({lhs})"
    text = {"<": excess, ">": shortfall}.get(constraint.sign[0], f"max({excess}, {shortfall})")
    return Objective(text, Expression.parse(text, NAMES))


def _loosened(constraint: Constraint, violation: float) -> str:
    """The constraint with a threshold that the least violation satisfies."""
    lhs, sign, rhs = constraint.lhs, constraint.sign, constraint.rhs
    is_upper_limit = sign[0] == "<"
    # An equation becomes a limit on the distance of its two sides.
    if sign == "==":
        distance = f"max({lhs.text} - {rhs.text}, {rhs.text} - {lhs.text})"
        return f"{distance} <= {_rounded_up(violation)!r}"

    # A number is replaced by another one, rounded so that the layout still satisfies it.
    if not rhs.names:
        threshold = float(rhs(_none).lo)
        if sign[0] == "<":
            loosened = _rounded_up(threshold + violation)
        else:
            loosened = _rounded_down(threshold - violation)
        return f"{lhs.text} {sign} {loosened:.12g}"
    change = "+" if is_upper_limit else "-"
    return f"{lhs.text} {sign} {rhs.text} {change} {_rounded_up(violation)!r}"


def _none(name: str) -> Any:
    raise AssertionError(name)


def _rounded_up(value: float) -> float:
    """Round up to four digits, to a number above the value."""
    return _rounded(value, ceil, 1e-6)


def _rounded_down(value: float) -> float:
    """Round down to four digits, to a number below the value."""
    return _rounded(value, floor, -1e-6)


def _rounded(value: float, round_number: Callable[[float], int], margin: float) -> float:
    if value == 0:
        return margin
    target = value + abs(value) * margin
    unit = 10.0 ** (floor(log10(abs(target))) - 3)
    return float(f"{round_number(target / unit) * unit:.12g}")


def _restricted(question: Question) -> Iterator[str]:
    """Fields of the space that have fewer values than by default."""
    default = _default(question)
    for field in fields(SearchSpace):
        values = getattr(question.space, field.name)
        default_value = getattr(default, field.name)
        if not isinstance(default_value, bool) and not set(default_value) <= set(values):
            yield field.name


def _default(question: Question) -> SearchSpace:
    return default_space(question.problem, fewer_devices=question.space.fewer_devices)


def _with_default(question: Question, name: str) -> Question:
    return replace(
        question, space=replace(question.space, **{name: getattr(_default(question), name)})
    )


def _freed(question: Question, name: str) -> Change:
    """The change of a field's values back to the default ones."""
    return Change(
        f"a {name} other than {', '.join(map(str, getattr(question.space, name)))}",
        {"free": name},
    )


def _with_other_devices(question: Question, target: Question) -> Question:
    """The question on `target`, in its default space but for the fields restricted here."""
    # Default values depend on devices and batch, so that they are those of the target. Restrictions
    # and freedoms that the user set stay.
    restricted = {name: getattr(question.space, name) for name in _restricted(question)}
    extra = {
        field.name: getattr(question.space, field.name)
        for field in fields(SearchSpace)
        if field.name in ("schedule", "etp", "order", "tp_overlap", "recompute_full_layers")
        or field.name.startswith(("overlap", "offload", "any_"))
    }
    return replace(target, space=replace(_default(target), **(extra | restricted)))


def _on_devices(question: Question, devices: int) -> Question:
    return _with_other_devices(question, question.with_problem(devices=devices))


def _around(n: int, largest: int) -> Iterator[int]:
    """Neighbours of `n` from 1 to `largest`, nearest first; the larger of two at the same distance
    comes first."""
    for distance in range(1, NEAR + 1):
        if n + distance <= largest:
            yield n + distance
        if n - distance >= 1:
            yield n - distance


def _possible(question: Question) -> bool:
    grids = enumerate_grids(question.space, question.problem, Counter())
    try:
        return next(grids, None) is not None
    except LayoutError:  # more devices than there are
        return False


def _fits(question: Question) -> bool:
    try:
        return price(question, Counter()).feasible > 0
    except LayoutError:
        return False
