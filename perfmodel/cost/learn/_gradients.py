"""Answers for kernels that the tables time differently: corrections by die, and gradients of
products.

Some sources time both gradient products of a whole backward pass (`bwd`) together, others one at a
time. If a device's measurements have the whole, a gradient product takes its share of it, in
proportion to the predicted times of the two products; otherwise the whole is their sum. Either way
the parts add up to the whole.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn._queries import Prediction, PriceQuery, Query
from perfmodel.cost.learn.plans import Plan, timed_for
from perfmodel.cost.learn.rows import Rows, kinds_of, physics_of
from perfmodel.cost.learn.stack import FEW_ROWS, Stack
from perfmodel.ops import ATTENTION_MASKS, FAMILIES, GradientProducts, KernelKind

# --- dies
# ----------------------------------------------------------------------------------------------
#
# Corrections by die for kernels that the tables do not cover: fused attention as training runs it,
# from kernels that were timed otherwise (servers' with their caches, forward for backward, 16 bits
# for 8, fewer exponentials in a clock); norms, by the share of the bandwidth that they reach, and
# the least time of kernels that do little more than move their tensors; and products of 8 bits that
# were timed together with the quantising of their first operand.


_WIDE: Final = 128
"""Elements per head above which the backward pass keeps fewer tiles in registers."""
_OVER_FORWARD: Final = {
    ("GH100", "half"): (2.99, 3.85),
    ("GH100", "fp8"): (4.27, 5.50),
    ("GB100", "half"): (3.11, 3.70),
    ("GB100", "fp8"): (3.31, 3.19),
}
"""Time of backward over that of forward, of heads of up to `_WIDE` elements and of wider ones:
medians over the benchmarks of NVIDIA/cudnn-frontend (H200: 1.19.0, GB200: 1.21.1), sequences of 2k
to 75k tokens, both masks, backward not deterministic where that was timed. GH100 has no wide heads
in 8 bits: their ratio is taken to grow as in 16."""
_OVER_FORWARD_OF_WINDOWS: Final = {"GH100": 3.55, "GB100": 2.33}
"""Time of backward over that of forward, of sliding windows in 16 bits: medians over
NVIDIA/cudnn-frontend 1.31.0, benchmark/attention_training, gpt_oss (windows of 128 tokens, heads of
64 elements, 2k to 32k tokens, H200; GB200 and GB300)."""
_TIMED_WINDOW: Final = 128
"""Tokens of the windows of `_OVER_FORWARD_OF_WINDOWS`: the tiles of wider ones are edges in a
smaller share, 128 over the window. With 1,024 tokens (1.19.0, H200), the ratio is nearly that
without a window, 2.94."""
_EQUAL_HEAD: Final = 128
"""Elements of a value from which longer queries and keys (192, latent attention) cost as much as
their FLOPs: special kernels reach 1,585 and 643 TFLOP/s on GB200 and H200 at 8k causal tokens,
kernels for equal heads 1,574 and 644 (the same benchmarks). Serving tables have no such heads."""
_QUERY_HEADS: Final = 8
"""Query heads per key head at which servers' kernels copy little into their caches; most were timed
there."""
_NARROW_FORWARD: Final = {"GH100": (0.67, 0.67), "GB100": (0.77, 0.68)}
"""Time of a forward in 8 bits over that in 16, as `_OVER_FORWARD` by head; GH100 has no wide heads
in 8 bits."""
_OVER_SERVED: Final = {"GB100": 1.07, "GH100": 0.94}
"""Time of a training forward on a part with `USUAL_EXPONENTIALS` over what servers' kernels take.

GB100, whose servers' kernels were timed on Blackwell Ultra: the median over NVIDIA/cudnn-frontend
1.31.0, benchmark/attention_training, of GB200 and, by `log_over_exponentials`, GB300 (16 bits,
llama3.1 and dsv3, 4k to 32k tokens, both masks: from 0.88 to 1.27). GH100: the median over the
benchmark of 1.19.0 on H200 (16 bits, llama3.1 and dsv3, 2k to 32k tokens, causal), each model's
within 0.02 of it."""
_WIDEST_UNMASKED: Final = 80
"""Elements of the widest head that servers' kernels were timed with over whole sequences without a
mask."""
_EDGE_TOKENS: Final = {"GH100": 640.0, "GB100": 640.0}
"""Tokens E of a causal mask's edge: over n tokens, causal attention takes 1 + E/n times half of
full attention, as it computes the tiles on the diagonal whole and its tiles are unequally long. The
median over the benchmarks of `_OVER_FORWARD` (16 and 8 bits, 2k to 32k tokens); 588 to 698 by
device and model. On other dies servers' kernels leave other edges."""
USUAL_EXPONENTIALS: Final = 16
"""Exponentials in a clock of the multiprocessors on which the ratios above were timed."""


def without_copies(rows: Rows, copied: np.ndarray) -> Rows:
    """Give the rows whose kernels copy keys into a cache (`copied` [n]) few key heads.

    There is then little to copy, and the time is that of a kernel that reads keys in place: it
    takes as long for few key heads as for many.
    """
    heads = np.asarray(rows.shape["heads"], float)
    kv_heads = np.asarray(rows.shape["kv_heads"], float)
    # one head of keys for eight of queries: little to copy, and of such models there are most rows
    few_heads = np.minimum(kv_heads, np.maximum(1.0, np.floor(heads / _QUERY_HEADS)))
    return rows.changed({"kv_heads": np.where(copied, few_heads, kv_heads)})


def as_causal(
    rows: Rows, die: np.ndarray, as_asked: np.ndarray
) -> tuple[Rows, Float64[np.ndarray, "n"]]:
    """Replace full self-attention of wide heads, which servers time only under a causal mask, by
    causal attention over the same tokens.

    Returns the changed rows and, for each, the log of the original row's time relative to the
    changed one's: twice, less the mask's edge (`_EDGE_TOKENS`), and no less where sequences are
    shorter than that. Only forward rows on dies where both masks were compared change.

    Args:
        die: die of each row [n].
        as_asked: rows that stay as they are, bool[n].
    """
    full = rows.by_kind(lambda kind: kind.op == "full" and kind.pass_ == "fwd") & ~as_asked
    queries = np.asarray(rows.shape["seq_q"], float)
    keys = np.asarray(rows.shape["seq_kv"], float)
    compared = full & np.isin(die, list(_EDGE_TOKENS))
    wide = np.asarray(rows.shape["head_dim"]) > _WIDEST_UNMASKED
    changed = compared & wide & (queries == keys) & ~_is_windowed(rows)
    edge = np.array([_EDGE_TOKENS.get(name, 0.0) for name in die])
    log_over = np.where(changed, np.maximum(np.log(2) - np.log1p(edge / queries), 0.0), 0.0)
    shape = rows.shape | {"causal": np.where(changed, 1.0, rows.shape["causal"])}
    columns = rows.columns._replace(op=np.where(changed, "causal", rows.columns.op).astype(object))
    return Rows(rows.family, shape, *kinds_of(columns)), log_over


def as_equal_heads(
    rows: Rows, die: np.ndarray, as_asked: np.ndarray
) -> tuple[Rows, Float64[np.ndarray, "n"]]:
    """Replace 8-bit attention and attention with long queries by a comparable 16-bit one with heads
    of equal length.

    Returns the changed rows and, for each, the log of the original row's time relative to the
    changed one's. Only forward rows on dies where the comparison was measured change.

    Args:
        die: die of each row [n].
        as_asked: rows that stay as they are, bool[n].
    """
    forward = rows.by_kind(lambda kind: kind.op in ATTENTION_MASKS and kind.pass_ == "fwd")
    comparable = forward & ~as_asked & np.isin(die, list(_NARROW_FORWARD))
    head = np.asarray(rows.shape["head_dim"], float)
    value = np.asarray(rows.shape["head_dim_v"], float)
    longer = comparable & (value == _EQUAL_HEAD) & (head > value)
    narrow = comparable & (rows.dtypes == "fp8")

    # Longer queries and keys cost what their FLOPs do: 2 (d_qk + d_v) for each pair of a query and
    # a key.
    log_over = np.where(longer, np.log((head + value) / (2 * _EQUAL_HEAD)), 0.0)

    # 8 bits take a measured share of the time of 16, one for heads of usual length and one for
    # wider ones.
    shares = np.array([_NARROW_FORWARD.get(name, (1.0, 1.0)) for name in die])
    share = np.where(head > _WIDE, shares[:, 1], shares[:, 0])
    log_over += np.where(narrow, np.log(share), 0.0)

    element_bytes = np.where(narrow, 2.0, rows.shape["element_bytes"])
    shape = rows.shape | {"head_dim": np.where(longer, value, head), "element_bytes": element_bytes}
    columns = rows.columns._replace(dtype=np.where(narrow, "half", rows.dtypes).astype(object))
    return Rows(rows.family, shape, *kinds_of(columns)), log_over


def log_over_served(request: PriceQuery, served: np.ndarray) -> Float64[np.ndarray, "n"]:
    """Log of the time of a training forward relative to the inference server's kernel that stands
    in for it; 0 for other rows.

    Args:
        served: whether a server's kernel stands in for a row [n].
    """
    forward = request.rows.by_kind(lambda kind: kind.op in ATTENTION_MASKS and kind.pass_ == "fwd")
    log_ratio_of_die = request.of_query(
        lambda query: np.log(_OVER_SERVED.get(query.figures.die, 1.0))
    )
    return np.where(
        served & forward & ~_is_windowed(request.rows),
        log_ratio_of_die + log_over_exponentials(request),
        0.0,
    )


def log_over_exponentials(request: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Log of the time of attention on a device relative to the same kind of device with
    `USUAL_EXPONENTIALS`.

    The products of a tile and its exponentials wait for each other (FlashAttention-4,
    assets/fa4_paper.pdf of Dao-AILab/flash-attention), so their times add up. Of a pair of a query
    and a key: 2 (d_qk + d_v) FLOPs forward, 2.5 times as many backward, at the peak of the element
    type, and an exponential either way. Tiles of a sliding window are mostly edges, whose time goes
    elsewhere. Callers ask for the most measured part of a die: with the peak or the clock of
    another part, the ratio could grow while both times fall.
    """
    shape, kinds = request.rows.shape, request.rows.kinds

    # Seconds of the products of one pair of a query and a key on the whole device.
    head = np.asarray(shape["head_dim"], float)
    value = np.asarray(shape["head_dim_v"], float)
    backward = request.rows.by_kind(lambda kind: 2.5 if kind.pass_ == "bwd" else 1.0)
    peaks_by_kind = request.of_query(
        lambda query: [query.figures.peak(kind.dtype) for kind in kinds]
    )
    peak = np.take_along_axis(peaks_by_kind, request.rows.kind[:, None], axis=1)[:, 0]
    products_s = 2.0 * (head + value) * backward / peak

    # Exponentials per second of the whole device, with its own and with the usual special function
    # units.
    def exponentials_per_s(query: Query) -> list[float]:
        figures = query.figures
        return [
            per_clock * figures.units * figures.clock
            for per_clock in (USUAL_EXPONENTIALS, figures.exponentials_per_clock)
        ]

    usual_hz, device_hz = request.of_query(exponentials_per_s).T
    log_over = np.log((products_s + 1 / device_hz) / (products_s + 1 / usual_hz))
    return np.where(_is_windowed(request.rows), 0.0, log_over)


def _is_windowed(rows: Rows) -> np.ndarray:
    """Whether attention sees a window of its keys, bool[n]."""
    window = np.asarray(rows.shape["window"], float)
    keys = np.asarray(rows.shape["seq_kv"], float)
    return (window > 0) & (window < keys)


def forward_rows(rows: Rows) -> Rows:
    """Forward rows that correspond to backward rows."""
    return rows.changed({}, pass_="fwd")


def log_over_forward(request: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Log of the time of backward rows relative to their forward."""
    rows = request.rows
    die = request.of_query(lambda query: query.figures.die)
    by_width = np.array(
        [_OVER_FORWARD[name, dtype] for name, dtype in zip(die, rows.dtypes, strict=True)]
    )
    unwindowed = np.where(
        np.asarray(rows.shape["head_dim"]) > _WIDE, by_width[:, 1], by_width[:, 0]
    )
    # Tiles at the edges of a window have a ratio of their own; of wider windows they are fewer.
    at_edges = np.array([_OVER_FORWARD_OF_WINDOWS[name] for name in die])
    window = np.maximum(np.asarray(rows.shape["window"], float), _TIMED_WINDOW)
    in_window = _is_windowed(rows) & (rows.dtypes == "half")
    edge_share = np.where(in_window, _TIMED_WINDOW / window, 0.0)
    log_over = np.log(unwindowed) + edge_share * np.log(at_edges / unwindowed)

    # Backward has one exponential for 2.5 times the products, so fewer exponentials in a clock slow
    # it down less.
    return (
        log_over
        + log_over_exponentials(request)
        - log_over_exponentials(request.with_rows(forward_rows(rows)))
    )


class _Shares(NamedTuple):
    """Shares of the memory bandwidth that a norm reaches beyond `_NORM_FIXED_S`."""

    forward: float
    backward: float


_NORMS: Final = ("layer_norm", "rms_or_layer_norm")
_NORM_FIXED_S: Final = 4e-6
_FUSED: Final = {"GH100": _Shares(0.84, 0.74), "GB100": _Shares(0.87, 0.65)}
_BY_SOFTWARE: Final = {
    ("GH100", "pytorch"): _Shares(0.68, 0.33),
    ("GB100", "pytorch"): _Shares(0.64, 0.27),
    ("GH100", "torch_compile"): _Shares(0.90, 0.38),
    ("GB100", "torch_compile"): _Shares(0.75, 0.30),
}
"""Medians over RMS norms of 40 MB of traffic and more, in 16 bits (NVIDIA/cudnn-frontend 1.19.0,
benchmark/norms, on H200 and GB200). `_FUSED`: cuDNN's, for which those of Transformer Engine and
Apex stand too."""
_NORM_HALF_WIDTH: Final = 0.3
"""Half-width of the 90 % interval, in log time: the scatter of the shapes around their median."""
STREAM_SHARE: Final = 0.92
"""Share of the nominal bandwidth that long streams reach: 7,394 of 8,000 GB/s on B200
(arjunds/efficient-ai, GPU_power/microbench), and Liger-Kernel 0.8's SwiGLU on H100."""
_COUNTED: Final = {"quantize_fp8_static": 3 / 4}
"""Bytes that a kernel moves relative to those of its elements: one of two tensors is written in 8
bits."""


def norm_times(request: PriceQuery) -> Prediction:
    """Times of norms, by the named software if it was timed."""
    backward = request.rows.by_kind(lambda kind: int(kind.pass_ == "bwd"))
    by_pass = request.of_query(
        lambda query: [share * query.figures.bandwidth for share in _shares(query)]
    )
    bytes_per_s = np.take_along_axis(by_pass, backward[:, None], axis=1)[:, 0]
    log_time = np.log(_NORM_FIXED_S + _compulsory_bytes(request) / bytes_per_s)
    return Prediction.around(log_time, _NORM_HALF_WIDTH, "learned")


def log_least(request: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Log of the time to stream from memory all bytes that exceed the last-level cache; -inf if
    none do."""
    l2, bandwidth = request.of_query(lambda query: [query.figures.l2, query.figures.bandwidth]).T
    counted = request.rows.by_kind(lambda kind: _COUNTED.get(kind.op, 1.0))

    # A kernel that is timed repeatedly finds its operands in the cache if they fit.
    beyond_cache = np.maximum(_compulsory_bytes(request) * counted - l2, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(beyond_cache / (STREAM_SHARE * bandwidth))


def _shares(query: Query) -> _Shares:
    """Shares that norms of the requested software reach; those of fused norms if it was not
    timed."""
    software = (query.software or "").partition(";")[0]
    die = query.figures.die
    return _BY_SOFTWARE.get((die, software), _FUSED.get(die, _Shares(1.0, 1.0)))


def _compulsory_bytes(request: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Compulsory traffic of every row."""
    physics, _ = physics_of(
        [query.figures for query in request.queries], request.query, request.rows
    )
    return physics.bytes


_QUANTISING_LAUNCHES_S: Final = 14e-6
"""Time of the few small kernels that find an operand's scale, whatever its size."""
_QUANTISING_BYTES: Final = 5.0
"""Bytes per element: 16 bits read for the maximum, read again, and 8 bits written."""
_QUANTISING_SHARE: Final = {"GH100": 0.61, "GB100": 0.55}
"""Share of the memory bandwidth at which these bytes move, by die; 1 for others. Like
`_QUANTISING_LAUNCHES_S`, the limit of the rows' times for n to 0, relative to m k (aiconfigurator's
products of 8 bits on H100, B300 and GB300; those of 16 bits tend to nothing; on L40S and RTX PRO
6000 it is the whole bandwidth)."""
_LEAST_PRODUCT_SHARE: Final = 0.25
"""Least share of a row's time that remains for its product."""


def log_product_share(
    request: PriceQuery, log_time: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Log of the share of `log_time` that products [m, k] x [k, n] take without quantising [m,
    k]."""
    shape = request.rows.shape
    elements = np.asarray(shape["m"] * shape["k"] * shape["batch"] * shape["groups"], float)
    bytes_per_s = request.of_query(
        lambda query: query.figures.bandwidth * _QUANTISING_SHARE.get(query.figures.die, 1.0)
    )
    quantising_s = _QUANTISING_LAUNCHES_S + _QUANTISING_BYTES * elements / bytes_per_s

    # Quantising may seem to take longer than the row did, where the row is short: some of it is
    # always the product.
    return np.log(np.maximum(1.0 - quantising_s * np.exp(-log_time), _LEAST_PRODUCT_SHARE))


# --- gradients of products
# -----------------------------------------------------------------------------


AnswerMethod = Literal["itself", "near measured", "sum", "share", "by forward", "by bandwidth"]
"""How the time of a kind is found: by its own plan, by its own plan only near measured shapes, as
the sum of its two products, as a share of the whole backward, from its forward pass, or from the
memory bandwidth."""

WHOLE: Final = "bwd"
GRADIENTS: Final = ("dgrad", "wgrad")


def answer_method(
    family: str,
    kind: KernelKind,
    query: Query,
    stacks: tuple[Stack, ...],
    plan: Callable[[Query, KernelKind], Plan],
) -> AnswerMethod:
    """The method by which a regressor of these stacks answers a kind on a device."""
    # Dies on which training kernels were timed beside those of the tables (above), unless a source
    # is named.
    is_backward_of_attention = kind.op in ATTENTION_MASKS and kind.pass_ == WHOLE
    over_forward = is_backward_of_attention and (query.figures.die, kind.dtype) in _OVER_FORWARD
    if over_forward and not any(stack.source == query.source for stack in stacks):
        return "by forward"

    # Norms in 16 bits on a die where fused norms were timed.
    is_norm = kind.dtype == "half" and kind.op in _NORMS and kind.pass_ in ("fwd", "bwd")
    if is_norm and query.figures.die in _FUSED:
        if timed_for(plan(query, kind), stacks, query.figures, query.source):
            return "itself"
        return "by bandwidth"

    # Backward of attention that was timed on the device's own die in few rows.
    if is_backward_of_attention:
        (first, *more_terms) = plan(query, kind).terms
        stack = stacks[first.stack]
        has_few_rows = (
            not more_terms
            and stack.figures.same_die(query.figures)
            and stack.kinds[first.kind] < FEW_ROWS
        )
        return "near measured" if has_few_rows else "itself"

    # Gradients of products: the whole is the sum of its parts, or a part is a share of the whole,
    # depending on which the device has enough rows of. With enough of both, the parts decide.
    if FAMILIES[family].gradients is None or kind.pass_ not in (WHOLE, *GRADIENTS):
        return "itself"
    backward = _direct_preference(plan, query, stacks, replace(kind, pass_=WHOLE))
    parts = [
        _direct_preference(plan, query, stacks, replace(kind, pass_=gradient))
        for gradient in GRADIENTS
    ]
    if backward is None or all(part is not None and part <= backward for part in parts):
        return "sum" if kind.pass_ == WHOLE else "itself"
    return "itself" if kind.pass_ == WHOLE else "share"


def _direct_preference(
    plan: Callable[[Query, KernelKind], Plan],
    query: Query,
    stacks: tuple[Stack, ...],
    kind: KernelKind,
) -> tuple | None:
    """Sort key of the stack that answers a kind directly, if it is the requested one or has enough
    rows."""
    answer = plan(query, kind)
    stack = stacks[answer.terms[0].stack]
    known = answer.terms[0].kind
    enough = stack.kinds[known] >= FEW_ROWS or stack.source == query.source
    if answer.mode not in ("direct", "sibling") or known != kind or not enough:
        return None
    return stack.preference(known, query.source, query.software)


def gradient_products(rows: Rows) -> tuple[Rows, Rows]:
    """The two products of `bwd` rows: input gradient and weight gradient."""
    input_gradient, weight_gradient = _gradient_rule(rows).split(rows.shape, rows.columns)
    input_rows = rows.changed(input_gradient, pass_=GRADIENTS[0])
    weight_rows = rows.changed(weight_gradient, pass_=GRADIENTS[1])
    return input_rows, weight_rows


def whole_backward(rows: Rows) -> Rows:
    """Turn rows of single gradient products (input or weight gradient) into rows of the whole
    backward pass: the inverse of `gradient_products`."""
    return rows.changed(_gradient_rule(rows).join(rows.shape, rows.columns), pass_=WHOLE)


def _gradient_rule(rows: Rows) -> GradientProducts:
    rule = FAMILIES[rows.family].gradients
    if rule is None:
        raise TypeError(f"the gradients of {rows.family} are not matrix products")
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
    """A kernel's time from a related kernel and the log of their ratio; never counted as
    measured."""
    learned = 1
    return Prediction(
        log_time=related.log_time + log_ratio,
        log_low=related.log_low + log_ratio,
        log_high=related.log_high + log_ratio,
        provenance=np.maximum(related.provenance, learned),
    )
