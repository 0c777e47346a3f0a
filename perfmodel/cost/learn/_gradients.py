"""Converts between a product's whole backward pass (`bwd`) and its two gradient products.

Some sources time both gradients of a product together, others one at a time. Whichever a device's measurements
know is believed: where they know the whole, a gradient product is its share of it, by the times of the two apart;
elsewhere the whole is the sum of the two. Either way they add up.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from perfmodel.cost.learn._dies import goes_by_bandwidth, goes_by_forward
from perfmodel.cost.learn._queries import Prediction, Query
from perfmodel.cost.learn.plans import Plan, timed_for
from perfmodel.cost.learn.rows import Rows
from perfmodel.cost.learn.stack import FEW_ROWS, Stack
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, GradientProducts, KernelKind

Way = Literal["itself", "near measured", "sum", "share", "by forward", "by bandwidth"]
"""How a kind is answered: by its own plan, by it near measured shapes only, as the sum of its two products, as a
share of the whole, by its forward, or by the memory bandwidth (`learn._dies`)."""

WHOLE: Final = "bwd"
GRADIENTS: Final = ("dgrad", "wgrad")


def answer_method(
    family: str,
    kind: KernelKind,
    query: Query,
    stacks: tuple[Stack, ...],
    plan: Callable[[Query, KernelKind], Plan],
) -> Way:
    """The method by which a regressor of these stacks answers a kind on a device."""
    # Dies on which training kernels were timed beside those of the tables (`learn._dies`), unless a source is named.
    if goes_by_forward(kind, query.figures.die) and not any(s.source == query.source for s in stacks):
        return "by forward"
    if goes_by_bandwidth(kind, query.figures.die):
        return "itself" if timed_for(plan(query, kind), stacks, query.figures, query.source) else "by bandwidth"

    # Backward of attention that was timed on the device's own die in few rows.
    if kind.op in ATTENTION_MASKS and kind.pass_ == WHOLE:
        (first, *more_terms) = plan(query, kind).terms
        stack = stacks[first.stack]
        few = not more_terms and stack.figures.same_die(query.figures) and stack.kinds[first.kind] < FEW_ROWS
        return "near measured" if few else "itself"

    # Gradients of products: the whole by its parts or a part by the whole, whichever the device's own rows are
    # believed in, and the parts where both are.
    if FAMILIES[family].gradients is None or kind.pass_ not in (WHOLE, *GRADIENTS):
        return "itself"
    backward = _believed(plan, query, stacks, replace(kind, pass_=WHOLE))
    parts = [_believed(plan, query, stacks, replace(kind, pass_=gradient)) for gradient in GRADIENTS]
    if backward is None or all(part is not None and part <= backward for part in parts):
        return "sum" if kind.pass_ == WHOLE else "itself"
    return "itself" if kind.pass_ == WHOLE else "share"


def _believed(
    plan: Callable[[Query, KernelKind], Plan], query: Query, stacks: tuple[Stack, ...], kind: KernelKind
) -> tuple | None:
    """Sort key of the stack by which a kind is answered directly, if it is the one asked or rests on enough rows."""
    answer = plan(query, kind)
    stack, known = stacks[answer.terms[0].stack], answer.terms[0].kind
    enough = stack.kinds[known] >= FEW_ROWS or stack.source == query.source
    if answer.mode not in ("direct", "sibling") or known != kind or not enough:
        return None
    return stack.preference(known, query.source, query.software)


def gradient_products(rows: Rows) -> tuple[Rows, Rows]:
    """The two products of `bwd` rows: input gradient and weight gradient."""
    of_inputs, of_weights = _rule(rows).split(rows.shape, rows.columns)
    return rows.changed(of_inputs, pass_=GRADIENTS[0]), rows.changed(of_weights, pass_=GRADIENTS[1])


def whole_backward(rows: Rows) -> Rows:
    """Rows of `bwd` that rows of gradient products belong to, without accumulation: inverse of `gradient_products`."""
    return rows.changed(_rule(rows).join(rows.shape, rows.columns), pass_=WHOLE)


def _rule(rows: Rows) -> GradientProducts:
    rule = FAMILIES[rows.family].gradients
    if rule is None:
        raise TypeError(f"gradients of {rows.family} are no products")
    return rule


def added(a: Prediction, b: Prediction) -> Prediction:
    """The time of two kernels in sequence, with fully correlated errors."""
    return Prediction(
        log_time=np.logaddexp(a.log_time, b.log_time),
        log_low=np.logaddexp(a.log_low, b.log_low),
        log_high=np.logaddexp(a.log_high, b.log_high),
        provenance=np.maximum(a.provenance, b.provenance),
    )


def scaled(related: Prediction, log_ratio: np.ndarray) -> Prediction:
    """A kernel's time from a related kernel and the log of their ratio; never counted as measured."""
    learned = 1
    return Prediction(
        log_time=related.log_time + log_ratio,
        log_low=related.log_low + log_ratio,
        log_high=related.log_high + log_ratio,
        provenance=np.maximum(related.provenance, learned),
    )
