"""The fused feed-forward of one rank's experts after routing."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from perfmodel.ops._op import Axis, Family, KernelOp, Pass, Shape, ShapeColumn
from perfmodel.ops.physics import Machine, Physics, divides, flag, log2

NONGATED_MOE = "moe_nongated"
"""Name of experts without a gate: two products per token."""


class MoEWork(NamedTuple):
    """Work of one rank's experts."""

    flops: Any
    bytes: Any
    products: Any
    """Matrix products per token: three, or two without a gate."""
    inter: Any
    """Inner size of this rank's shard of an expert."""
    local: Any
    """Experts of this rank."""
    routed: Any
    """Token copies that reach this rank's experts."""
    active: Any
    """Experts that receive any tokens."""
    weights_bytes: Any


def _work(xp: Any, x: Shape) -> MoEWork:
    """Products of hidden x inter per routed token; weights of the experts hit, and activations,
    moved once.

    Of E experts, r uniform draws hit E (1 - exp(-r / E)) (Poisson); a power law leaves more of them
    cold.
    """
    products = 3.0 - x["nongated"]
    inter = x["inter"] / x["moe_tp"]
    local = x["experts"] / x["moe_ep"]
    routed = x["tokens"] * x["topk"] / x["moe_ep"]
    size = x["element_bytes"]
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]

    # weights are read of the experts that get any token; a little more than none where hardly any
    # do
    active = xp.minimum(local, local * (1.0 - xp.exp(-routed / local)) + 1e-3)
    flops = 2.0 * products * routed * x["hidden"] * inter * repeats
    weights = products * xp.maximum(active, 1.0) * x["hidden"] * inter * size
    traffic = (weights + routed * (2.0 * x["hidden"] + 3.0 * inter) * size) * repeats
    return MoEWork(flops, traffic, products, inter, local, routed, active, weights)


def skew_of(distribution: str) -> float:
    """Exponent of the power law of expert choice; 0 if balanced."""
    # the exponent stands at the end of the name: `power_law_1.2`
    _, _, exponent = str(distribution).rpartition("_")
    try:
        return float(exponent)
    except ValueError:
        return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MoE(KernelOp):
    """Fused expert feed-forward of one rank after routing (gate, up and down products)."""

    op: str = "moe"
    dtype: str = "bf16"
    tokens: int
    """Tokens of the rank before routing; each visits `topk` of `experts` experts."""
    hidden: int
    inter: int
    topk: int
    experts: int
    moe_tp: int = 1
    moe_ep: int = 1
    distribution: str = "balanced"
    pass_: Pass = "fwd"

    family = "moe"
    uses_matrix_units = is_matmul = True
    samples_field = "tokens"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        sizes = f"{self.hidden}x{self.inter} top{self.topk}/{self.experts}"
        return f"experts {self.tokens} tokens {sizes} {self.pass_}"

    @property
    def skew(self) -> float:
        return skew_of(self.distribution)

    def shape(self) -> dict[str, Any]:
        return KernelOp.shape(self) | {"nongated": int(self.op == NONGATED_MOE)}


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Expert feed-forward of one rank: three products (two without a gate) per routed token."""
    work = _work(xp, x)
    inter, local, routed = work.inter, work.local, work.routed
    size = x["element_bytes"]
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]

    # Each expert's rows fill tiles of their own: few rows per expert waste most of a tile.
    per_expert = routed / xp.maximum(work.active, 1.0)
    tiles = xp.maximum(work.active, 1.0) * xp.ceil(per_expert / 64.0)
    padded = tiles * 64.0
    waves_up = tiles * xp.ceil(2.0 * inter / 128.0) / machine.units
    waves_down = tiles * xp.ceil(x["hidden"] / 128.0) / machine.units
    features = [
        log2(xp, x["tokens"]),
        log2(xp, x["hidden"]),
        log2(xp, inter),
        log2(xp, x["topk"]),
        log2(xp, x["experts"]),
        log2(xp, local),
        log2(xp, x["moe_tp"]),
        log2(xp, x["moe_ep"]),
        x["skew"],
        flag(xp, x["skew"] > 0),
        # rows that the experts get, and how far they fill their tiles
        log2(xp, routed),
        log2(xp, work.active),
        log2(xp, per_expert),
        routed / padded,
        # waves of the two products: up with the gate, then down
        log2(xp, waves_up),
        log2(xp, waves_down),
        waves_up / xp.ceil(waves_up),
        waves_down / xp.ceil(waves_down),
        log2(xp, xp.ceil(waves_up)),
        log2(xp, xp.ceil(waves_down)),
        # Share of weights and activations that fits into the cache.
        log2(xp, work.weights_bytes / machine.l2),
        log2(xp, local * x["hidden"] * inter * size / machine.l2),
        log2(xp, x["tokens"] * x["hidden"] * size / machine.l2),
        log2(xp, x["tokens"] * x["topk"] / x["experts"]),
        log2(xp, x["inter"]),
        # a skewed routing matters by how many rows an expert has, and how many experts a rank
        x["skew"] * log2(xp, per_expert),
        x["skew"] * log2(xp, x["moe_ep"]),
        x["skew"] * log2(xp, local),
    ]
    features += [divides(xp, inter, d) for d in (64, 128, 256)]
    mean = x["tokens"] * x["topk"] / x["experts"]
    axes = [log2(xp, v) for v in (x["tokens"], x["hidden"], inter, local, mean, x["topk"])]

    # padded rows cost what rows do, but no more than eight times the work in all
    quantised = 2.0 * work.products * padded * x["hidden"] * inter * repeats
    return Physics(work.flops, xp.minimum(quantised, 8.0 * work.flops), work.bytes, features, axes)


MOE: Final = Family(
    op=MoE,
    columns={
        **dict.fromkeys(("tokens", "hidden", "inter", "topk", "experts"), ShapeColumn()),
        "moe_tp": ShapeColumn(1),
        "moe_ep": ShapeColumn(1),
        "skew": ShapeColumn(0, column="distribution", from_text=skew_of),
    },
    axes=(
        Axis("tokens", 0, 16, 2),
        Axis("hidden", 9, 15, 4),
        Axis("inter", 3, 16, 2),
        Axis("experts", -3, 11, 2),
        Axis("rows_per_expert", -10, 16, 2),
        Axis("topk", 0, 6, 2),
    ),
    physics=_physics,
    known_op=lambda op: NONGATED_MOE if op == NONGATED_MOE else "moe",
    kind_flags=lambda kind: {"nongated": float(kind.op == NONGATED_MOE)},
)
