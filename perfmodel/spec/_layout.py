"""Layouts: how a step is spread over devices, and the job that they run."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from perfmodel.errors import LayoutError, UnknownNameError

Recompute = Literal["none", "selective", "full"]
DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
"""What ranks are numbered by, in Megatron-LM's default order."""
EagerKernel = Literal["norm", "rope", "activation", "residual", "softmax", "cross_entropy", "attention_layout"]
"""Work that frameworks do in one fused kernel or in several element-wise ones; `attention_layout`: queries, keys and
values are copied into the order that the attention kernel takes them in."""
PerStage = tuple[int, ...] | None
"""A whole number per pipeline stage, in model order; written `7-9-9-7`."""
_DISTSIM = re.compile(r"^(\d+)M(\d+)P(\d+)D$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One parallel layout. Degrees multiply to the device count: tp * cp * pp * dp = devices."""

    tp: int = 1
    """Tensor-parallel degree (Megatron column/row parallel)."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel replicas; `ep` divides dp * cp."""
    cp: int = 1
    """Context-parallel degree (sequence split through attention)."""
    ep: int = 1
    """Expert-parallel degree."""
    vpp: int = 1
    """Virtual stages (model chunks) per pipeline rank; 1 leaves it to the schedule."""
    micro_batch: int = 1
    """Sequences per micro-batch and data-parallel replica."""
    schedule: str = "1f1b"
    """Pipeline schedule by name (`perfmodel schedules` lists them), with a number where it takes one
    (`chimera:4`), or `file:PATH`."""
    zero: int = 0
    """ZeRO stage: 0 replicated, 1 optimizer states, 2 and gradients, 3 and weights sharded over dp * cp."""
    recompute: Recompute = "none"
    """`selective` recomputes the attention core, `full` every layer (Korthikanti section 5)."""
    sequence_parallel: bool = False
    """Norms and dropouts sharded over tp along the sequence (Korthikanti section 4.2.2)."""
    overlap_grad_reduce: bool = True
    """Gradient reduction runs on its own stream, bucket by bucket, behind backward."""
    overlap_param_gather: bool = True
    """ZeRO-3 weight all-gathers (and ZeRO-1/2 gathers after the step) are prefetched behind compute."""
    tp_overlap: bool = False
    """Tensor-parallel collectives hidden behind the products that feed them."""
    offload: bool = False
    """Activations wait for their backward in host memory."""
    order: str = "-".join(DIMENSIONS)
    """Dimensions from that of consecutive ranks to the outermost (Megatron-LM's notation)."""
    partition: PerStage = None
    """Layers of every pipeline stage; None: as even as can be."""
    recompute_full_layers: PerStage = None
    """So many layers of every stage, the first ones, are recomputed in full, the others as `recompute` says
    (Megatron-LM's recompute method `block`); one number: of every stage alike, as far as it has them."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"layout: {name} must be a whole number of at least 1, got {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.recompute not in ("none", "selective", "full"):
            raise LayoutError(f"layout: recompute must be none, selective or full, got {self.recompute!r}")
        names = self.order.split("-")
        if sorted(names) != sorted(DIMENSIONS) or names.index("dp") != names.index("ep") + 1:
            raise LayoutError(
                f"layout: order must name each of {', '.join(DIMENSIONS)} once with ep right before dp, as in "
                f"{'-'.join(DIMENSIONS)}; got {self.order!r}"
            )
        for name in ("partition", "recompute_full_layers"):
            value = getattr(self, name)
            if value is not None and not all(isinstance(n, int) and n >= 0 for n in value):
                raise LayoutError(f"layout: {name} must be a whole number per stage, like 7-9-9-7, got {value!r}")
        if self.recompute == "full" and self.recompute_full_layers is not None:
            raise LayoutError("layout: recompute=full leaves nothing to recompute_full_layers; give one of them")
        if (self.dp * self.cp) % self.ep:
            raise LayoutError(f"layout: ep={self.ep} must divide dp*cp={self.dp * self.cp}")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"layout: vpp={self.vpp} needs pp > 1; use vpp=1")
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)
        if self.vpp > 1 and self.schedule == "1f1b":
            object.__setattr__(self, "schedule", "interleaved")

    @property
    def devices(self) -> int:
        """tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> "Layout":
        """Read `"tp=8,pp=16,..."` or DistSim's notation `8M16P1D` (section 5.1: model, pipeline, data).

        Raises:
            LayoutError: for a value that does not parse, a key that is given twice, or an empty text.
            UnknownNameError: for a key that no layout has.
        """
        if not text.strip(" ,"):
            raise LayoutError("layout: it is empty; give degrees, such as tp=8,pp=4,dp=2")
        head, _, rest = text.strip().partition(",")
        values: dict[str, Any] = dict(defaults)
        if match := _DISTSIM.match(head.strip()):
            values |= dict(zip(("tp", "pp", "dp"), map(int, match.groups()), strict=True))
            text = rest
        types = {f.name: f.type for f in fields(cls)}
        given = {"tp", "pp", "dp"} if match else set[str]()
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, sign, raw = (s.strip() for s in item.partition("="))
            if not sign:
                raise LayoutError(f"layout: {item!r} is not key=value (nor like 8M16P1D)")
            if key not in types:
                raise UnknownNameError("layout key", key, types)
            if key in given:
                raise LayoutError(f"layout: {key} is given twice, the second time as {raw!r}; leave one out")
            given.add(key)
            values[key] = _convert(key, raw, types[key])
        return cls(**values)

    def replace(self, **changes: Any) -> "Layout":
        """A copy with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """The non-default fields in the notation that `parse` reads."""
        shown = [f"{k}={getattr(self, k)}" for k in ("tp", "pp", "dp")]
        for f in fields(self)[3:]:
            value = getattr(self, f.name)
            if value != f.default:
                shown.append(f"{f.name}={_written(value)}")
        return ",".join(shown)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _convert(key: str, raw: str, kind: Any) -> Any:
    if kind == PerStage:
        try:
            return tuple(map(int, raw.split("-")))
        except ValueError:
            raise LayoutError(f"layout: {key} must be a whole number per stage, like 7-9-9-7, got {raw!r}") from None
    if kind is bool:
        if raw.lower() in ("true", "1", "yes"):
            return True
        if raw.lower() in ("false", "0", "no"):
            return False
        raise LayoutError(f"layout: {key} must be true or false, got {raw!r}")
    if kind is int:
        try:
            return int(raw)
        except ValueError:
            raise LayoutError(f"layout: {key} must be a whole number, got {raw!r}") from None
    return raw


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one step computes, apart from how it is laid out."""

    global_batch: int
    """Sequences (or images) per optimizer step."""
    seq_len: int
    dtype: str = "bf16"
    mode: Literal["train", "inference"] = "train"
    flash_attention: bool = True
    """Fused attention; otherwise scores are materialised (batched products and a softmax kernel)."""
    grad_dtype: str = "fp32"
    """Element type in which gradients are accumulated and reduced."""
    fused_kernels: bool = True
    """Fused norm, bias-gelu, rope and cross-entropy kernels; otherwise element-wise eager ones."""
    eager_kernels: tuple[EagerKernel, ...] = ()
    """Kinds of work left to eager kernels though `fused_kernels` has the others fused."""
    keep_gathered: bool = False
    """Under sequence parallelism, inputs of column-parallel products are kept as they were gathered instead of being
    gathered again in backward: 2 s b h bytes a product that no tensor parallelism divides, and a collective less."""
    half_gradients: bool = False
    """16-bit gradients have a buffer of their own beside the fp32 one, to which kernels of their own add them after
    every backward, one per weight."""
    all_reduce_gradients: bool = False
    """ZeRO 1 reduces all gradients on all ranks, instead of each part on the rank that updates it."""
    weighted_experts: bool = False
    """The router's weights multiply the activation inside the experts, so that their outputs are not kept for the
    router's gradient (Megatron-Core since 0.12)."""
    frozen: bool = False
    """Weights are not trained (LoRA and other adapters, whose own work is left out): no gradients of them, no
    reduction, no optimizer."""
    stops_recompute: bool = False
    """Full recompute stops before a block's last product, whose result backward does not need: under a compiler (XLA)
    that sees forward and backward as one, and torch's checkpoint without reentry."""
    optimizer: Literal["adam", "sgd", "plain-sgd"] = "adam"
    """`sgd` keeps a momentum; `plain-sgd` keeps nothing and updates weights in their own element type."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "seq_len"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be at least 1, got {getattr(self, name)}")

    def fuses(self, kind: EagerKernel) -> bool:
        """Whether a kind of element-wise work runs as one kernel."""
        return self.fused_kernels and kind not in self.eager_kernels

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches per replica and step; raises `LayoutError` if the batch does not divide."""
        per_step = layout.micro_batch * layout.dp
        if self.global_batch % per_step:
            raise LayoutError(
                f"global batch {self.global_batch} is not divisible by dp*micro_batch = "
                f"{layout.dp}*{layout.micro_batch}; the nearest that is: "
                f"{max(1, round(self.global_batch / per_step)) * per_step}"
            )
        return self.global_batch // per_step
