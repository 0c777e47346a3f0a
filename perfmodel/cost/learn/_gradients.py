"""Backward of a product as a whole (`bwd`) and as its two gradient products: each answered by the other.

Some sources time both gradients of a product together, others one at a time. Whichever a device's measurements
know is believed: where they know the whole, a gradient product is its share of it, by the times of the two apart;
elsewhere the whole is the sum of the two. Either way they add up.
"""

from collections.abc import Callable
from typing import Final, Literal

import numpy as np

from perfmodel.cost.learn._attention_backward import goes_by_forward
from perfmodel.cost.learn._plan import FEW_ROWS, Plan, preference_for
from perfmodel.cost.learn._queries import Prediction, Query
from perfmodel.cost.learn._rows import Rows
from perfmodel.cost.learn._stack import Stack
from perfmodel.ops import ATTENTION_MASKS, product_layout

Way = Literal["itself", "near measured", "sum", "share", "by forward"]
"""How a kind is answered: by its own plan, by it near measured shapes only, as the sum of its two products, as a
share of the whole, or by its forward (`learn._attention_backward`)."""

WHOLE: Final = "bwd"
GRADIENTS: Final = ("dgrad", "wgrad")
SAME_SHAPE: Final = "grouped_linear"
"""Products whose gradients carry the shape of the forward product, as measured tables do; so do convolutions'."""


def way(
    family: str, kind: str, query: Query, stacks: tuple[Stack, ...], plan: Callable[[Query, str], Plan]
) -> Way:  # fmt: skip
    """How a regressor of these stacks answers a kind on a device."""
    dtype, op, direction = kind.split("/")
    if query.source is None and goes_by_forward(kind, query.figures.die):
        return "by forward"
    if op in ATTENTION_MASKS and direction == WHOLE:
        (first, *others) = plan(query, kind).terms
        stack = stacks[first.stack]
        few = not others and stack.figures.same_die(query.figures) and stack.kinds[first.kind] < FEW_ROWS
        return "near measured" if few else "itself"
    if family not in ("gemm", "conv") or direction not in (WHOLE, *GRADIENTS):
        return "itself"
    whole, *parts = (_believed(plan, query, stacks, f"{dtype}/{op}/{d}") for d in (WHOLE, *GRADIENTS))
    if whole is None or all(part is not None and part <= whole for part in parts):
        return "sum" if direction == WHOLE else "itself"
    return "itself" if direction == WHOLE else "share"


def _believed(plan: Callable[[Query, str], Plan], query: Query, stacks: tuple[Stack, ...], kind: str) -> tuple | None:
    """Sort key of the stack by which a kind is answered directly, if it is the one asked or rests on enough rows."""
    found = plan(query, kind)
    stack, known = stacks[found.terms[0].stack], found.terms[0].kind
    enough = stack.kinds[known] >= FEW_ROWS or stack.source == query.source
    if found.mode not in ("direct", "sibling") or known != kind or not enough:
        return None
    return preference_for(stack, known, query.source, query.software)


def gradient_products(rows: Rows) -> tuple[Rows, Rows]:
    """The two products that rows of `bwd` stand for: input gradient and weight gradient."""
    if rows.family == "conv":
        return _changed(rows, "dgrad", {}), _changed(rows, "wgrad", {})
    m, n, k, same = rows.shape["m"], rows.shape["n"], rows.shape["k"], _same_shape(rows)

    def unless_same(name: str, value: np.ndarray) -> np.ndarray:
        return np.where(same, rows.shape[name], value)

    # dX[m, k] = dY[m, n] W'[n, k]; dW'[n, k] = dY'[n, m] X[m, k]
    once = {"n": unless_same("n", k), "k": unless_same("k", n), "accumulate": np.zeros(len(rows))}
    other = {"m": unless_same("m", n), "n": unless_same("n", k), "k": unless_same("k", m)}
    return _changed(rows, "dgrad", once), _changed(rows, "wgrad", other)


def whole_backward(rows: Rows) -> Rows:
    """Rows of `bwd` that rows of gradient products belong to, without accumulation: inverse of `gradient_products`."""
    if rows.family == "conv":
        return _changed(rows, WHOLE, {})
    weight = np.array([kind.endswith("wgrad") for kind in rows.kind], bool)
    m, n, k, same = rows.shape["m"], rows.shape["n"], rows.shape["k"], _same_shape(rows)
    shape = {
        "m": np.where(weight & ~same, k, m),
        "n": np.where(same, n, np.where(weight, m, k)),
        "k": np.where(same, k, n),
        "accumulate": np.zeros(len(rows)),
    }
    return _changed(rows, WHOLE, shape)


def _same_shape(rows: Rows) -> np.ndarray:
    return np.array([kind.split("/")[1] == SAME_SHAPE for kind in rows.kind], bool)


def _changed(rows: Rows, direction: str, shape: dict[str, np.ndarray]) -> Rows:
    kind = np.array([f"{kind.rpartition('/')[0]}/{direction}" for kind in rows.kind], object)
    layout = {}
    if rows.family == "gemm":
        ops = np.array([k.split("/")[1] for k in kind], object)
        layout = product_layout(ops, np.full(len(rows), direction, object))
    return Rows(rows.family, rows.shape | shape | layout, kind)


def added(a: Prediction, b: Prediction) -> Prediction:
    """Two kernels one after the other; their errors as if they were one."""
    return Prediction(
        np.logaddexp(a.log_time, b.log_time), np.logaddexp(a.log_low, b.log_low),
        np.logaddexp(a.log_high, b.log_high), np.maximum(a.provenance, b.provenance),
    )  # fmt: skip


def scaled(one: Prediction, log_by: np.ndarray) -> Prediction:
    """A kernel by another one of so much less work; never itself measured."""
    return Prediction(one.log_time + log_by, one.log_low + log_by, one.log_high + log_by,
                      np.maximum(one.provenance, 1))  # fmt: skip


def share_of(whole: Prediction, part: Prediction, a: Prediction, b: Prediction) -> Prediction:
    """`part` of a whole whose two parts would take `a` and `b` by themselves; never itself measured."""
    log_share = part.log_time - np.logaddexp(a.log_time, b.log_time)
    return Prediction(whole.log_time + log_share, whole.log_low + log_share, whole.log_high + log_share,
                      np.maximum(whole.provenance, 1))  # fmt: skip
