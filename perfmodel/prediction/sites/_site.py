"""The site of a run: how its machines and software change the tables' times, and how much its runs
vary.

Clocks under load, spread between devices, generations of fused attention kernels; and the prior of
the site's runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

from perfmodel.cost import TENSOR_TYPES, has_power_law
from perfmodel.cost.learn import MeasuredLoad
from perfmodel.ops import Attention, Gemm, Op, Pass
from perfmodel.prediction.sites._adjustment import Adjustment
from perfmodel.prediction.sites._population import GENERIC, SitePopulation, SitePrior, population
from perfmodel.prediction.sites.constants import (
    MemorySpread,
    Sustained,
    memory_spread,
    sustained,
    team_key,
)
from perfmodel.spec import AttentionKernel, Device, Framework, Model
from perfmodel.spec.framework_facts import HostCosts

WITH_CLOCKS_OF_THEIR_OWN: Final = ("NVIDIA", "AMD")
"""Vendors whose devices each choose their clock, by their own leakage, temperature and power
limit."""
KERNEL_SPREAD: Final = 0.015
"""Standard deviation of the speed of devices of one kind: their times vary by 8 %, from the lowest
to the highest but for outliers (Sinha et al., arXiv 2208.11035), here taken for whiskers of box
plots, which span 5.4 standard deviations of a normal law. Found with published runs in view, whose
error is flat from 1 to 2 %."""
EAGER: Final = Framework()
"""Framework of predictions that name none."""
COMPILED: Final = Framework(host=HostCosts(execution="compiled"))
"""A step that is one compiled program."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Constants of a site; the defaults are for an unknown site."""

    sustained: Sustained | None = None
    """By architecture, the log slowdown of matrix products and attention in a training step,
    relative to the same kernels under their power limit (`perfmodel.cost.under_load`). None: fitted
    to all published sources, for devices without measured power, and read when first needed."""
    skew: float = KERNEL_SPREAD
    """Relative spread between ranks of the time of the same kernels, which makes ranks reach
    collectives at different times."""
    power_limited: bool = True
    """Whether the power limit of the device holds (`perfmodel.cost.sustained_seconds`)."""
    loads: tuple[MeasuredLoad, ...] = ()
    """Measured slowdowns of kernels under sustained load, from tables of the user's own devices."""
    population: SitePopulation | None = None
    """Priors of sites before any of their runs. None: fitted to all published sources, and read
    when first needed."""
    memory: MemorySpread | None = None
    """Distribution of measured over predicted memory peaks. None: that of all published sources."""
    unstated: float = 0.0
    """Share of the run's settings that are not stated."""
    contradictions: float = 0.0
    """Degree of contradiction in the run's description: 1 if its statements contradict each other,
    less if it is said to have run although it hardly fits into memory."""
    left_out: str = ""
    """Teams that the constants were fitted without (`team_key`)."""

    @classmethod
    def without(cls, source: str) -> "Site":
        """Constants fitted without the runs of a source's teams, for validation against that
        source."""
        return cls(
            sustained=sustained(source),
            population=population(source),
            memory=memory_spread(without=source),
            left_out=team_key(source),
        )

    def memory_spread(self) -> MemorySpread:
        """`memory`, loaded on first use."""
        return memory_spread() if self.memory is None else self.memory

    def clock(self, op: Op, device: Device) -> float:
        """Slowdown of an event in a training step relative to its time under the power limit."""
        if not op.uses_matrix_units or op.dtype not in TENSOR_TYPES:
            return 1.0
        if self.sustained is not None:
            return exp(dict(self.sustained).get(device.architecture, 0.0))
        # Where energies were measured, the power limit says all of it, and nothing was fitted.
        return (
            1.0 if has_power_law(device) else exp(dict(sustained()).get(device.architecture, 0.0))
        )

    def measured_load(self, op: Op, device: Device) -> float | None:
        """Measured slowdown of a kernel's family and element type under sustained load; None if
        nobody measured it.

        Without a power limit nothing slows down, so measurements under a limit do not apply.
        """
        if not self.power_limited:
            return None
        for load in self.loads:
            if (load.device, load.family, load.dtype) == (device.name, op.family, op.dtype):
                return load.slowdown
        return None

    def kernel_spread(self, device: Device) -> float:
        """Relative spread of kernel times between devices of one kind; 0 for chips with a fixed
        clock."""
        if device.vendor not in WITH_CLOCKS_OF_THEIR_OWN:
            return 0.0
        return self.skew

    def site_prior(
        self, framework: Framework, device: Device, model: Model | None = None
    ) -> SitePrior:
        """Prior of the site's runs, optionally for one model."""
        fitted = population() if self.population is None else self.population
        return fitted.site_prior(framework, device, model)

    def expected(self, framework: Framework, device: Device) -> Adjustment | None:
        """Parameters of the median site of the published record with a framework and device; None
        for `generic`."""
        # `generic` is not a framework that anybody ran: it is the physics alone.
        if framework.name == GENERIC:
            return None
        return self.site_prior(framework, device).expected(device)


# --- generations of attention kernels
# ------------------------------------------------------------------
#
# The kernel tables hold the fastest kernel of each device (cuDNN, FlashAttention-3 or like it from
# Hopper on, FlashAttention-2 before), but frameworks of an earlier day ran what there was. No table
# of ours times one generation against another: the ratios are those that authors of kernels
# published, and never fitted to a run. On AMD's devices the tables have no attention at all, and
# libraries reach less of the peak than is extrapolated.

_FLASH_2: Final[Mapping[str, Mapping[tuple[Pass, int], float]]] = {
    "GH100": {
        ("fwd", 64): 1.61,
        ("fwd", 128): 1.88,
        ("fwd", 256): 2.31,
        ("bwd", 64): 1.72,
        ("bwd", 256): 1.85,
    },
    "GB100": {("fwd", 256): 3.35, ("bwd", 256): 3.35},
}
"""Time of FlashAttention-2 relative to the fastest kernel of the day, by die, pass and elements per
head up to which it holds: geometric means over sequences of 2k to 16k tokens. H100:
FlashAttention-3's against it (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6; 16 bits, causal
and not, backward not causal; 128-element backward for wider heads), divided by 0.94: the kernels
of training take so much of the time of servers' kernels (`learn._gradients`). B200: cuDNN's forward
of 256 elements (flashinfer pull request 5133), backward assumed alike. Dies that are not
named have no instructions that it lacks: cuDNN takes 0.82 to 1.14 of its time on A100, L40S and RTX
PRO 6000 (transformers pull request 48163)."""
_OLDER: Final = {
    "flash-2": 1.0,
    "flash-1-triton": sqrt(1.3 * 2.5),
    "flash-1": sqrt(1.7 * 3.0),
}
"""Time relative to FlashAttention-2, assumed: geometric means of 1.3 to 2.5 and of 1.7 to 3.0. Dao
2023 (arXiv 2307.08691, abstract) says of the first that it takes about twice as long."""
_AMD_LIBRARIES: Final[Mapping[str, Mapping[tuple[Pass, int], float]]] = {
    "gfx942": {("fwd", 64): 2.15, ("fwd", 128): 1.79, ("bwd", 128): 1.29},
    "gfx950": {("fwd", 128): 1.43, ("bwd", 128): 1.29},
}
"""Time of AMD's own kernels (AITER, composable kernel) relative to what the cost models extrapolate
from NVIDIA's devices, by die, pass and elements per head up to which it holds: geometric means over
causal sequences of 2k to 16k tokens in bf16. MI300X forward: midiareshadi/attn-dsl-bench,
results/raw/sweep_v1.csv (ROCm 7.2; 242 to 494 TFLOP/s). MI350X forward and MI355X backward:
HazyResearch/HipKittens, analysis/attn (AITER 897 to 976 TFLOP/s, composable kernel 749 to 1,081).
Nobody's table has MI300X's backward, which is assumed alike."""
_TORCH: Final[Mapping[AttentionKernel, AttentionKernel]] = {
    "torch-fastest": "fastest",
    "torch-flash-2": "flash-2",
}
"""Generations that torch's `scaled_dot_product_attention` runs on devices which are not AMD's."""
_OF_TORCH: Final = (*_TORCH, "flash-2-then-cudnn")
_AOTRITON: Final[Mapping[str, Mapping[tuple[Pass, int], float]]] = {
    "gfx942": {("fwd", 64): 2.71, ("fwd", 128): 2.78, ("bwd", 128): 6.2},
    "gfx950": {("fwd", 128): 2.27, ("bwd", 128): 6.2},
}
"""Relative times of AOTriton, which torch's `scaled_dot_product_attention` runs on AMD's devices
(PyTorch aten/src/ATen/native/transformers/hip): of the same tables (MI300X forward 211 to 307
TFLOP/s, MI355X backward 143 to 259); MI355X's forward is of the Triton kernel that it follows
closely on MI300X, MI300X's backward assumed alike."""
FORWARD_SHARE: Final = 2 / 5
"""Products of a flash forward (2) over those of its backward (5)."""


def attention_slowdown(kernel: AttentionKernel, device: Device, op: Attention) -> float:
    """Time of fused attention of a kernel generation, relative to the cost models' time on a
    device."""
    if device.architecture.startswith("CDNA"):
        # No table has attention on older dies. Their kernels have the design of the oldest measured
        # ones.
        die = device.die if device.die in _AMD_LIBRARIES else "gfx942"
        of_library = _AOTRITON if kernel in _OF_TORCH else _AMD_LIBRARIES
        return _OLDER.get(kernel, 1.0) * _slowdown_of(of_library[die], op)
    if kernel in _TORCH:
        return attention_slowdown(_TORCH[kernel], device, op)
    if kernel == "fastest" or device.vendor not in ("NVIDIA", "AMD"):
        return 1.0
    if kernel == "flash-2-then-cudnn":
        return (
            1.0 if device.architecture == "Blackwell" else attention_slowdown("flash-2", device, op)
        )

    # Kernels on AMD's other devices follow the algorithm of FlashAttention-2 (composable kernel,
    # Triton), at about the share of the peak that it reaches on A100. The first generation divides
    # its work as badly there.
    return _OLDER[kernel] * _slowdown_of(_FLASH_2.get(device.die, {}), op)


def _slowdown_of(slowdowns: Mapping[tuple[Pass, int], float], op: Attention) -> float:
    """The slowdown of an op's pass and width of heads; 1 where its pass has none."""
    pass_ = "fwd" if op.pass_ == "fwd" else "bwd"
    slowdown_up_to = {}
    for (direction, head_dim), slowdown in slowdowns.items():
        if direction == pass_:
            slowdown_up_to[head_dim] = slowdown
    if not slowdown_up_to:
        return 1.0
    wide_enough = [head_dim for head_dim in slowdown_up_to if op.head_dim <= head_dim]
    return slowdown_up_to[min(wide_enough, default=max(slowdown_up_to))]


# --- products that nobody tuned
# ------------------------------------------------------------------------
#
# On AMD's devices a library takes the kernel that its heuristic ranks first; to time the candidates
# for a size is a switch that is off by default (ROCm TransformerEngine README,
# `TE_HIPBLASLT_TUNING_RUN_COUNT`; PyTorch's TunableOp).

_TUNED_TABLES: Final = ("CDNA2", "CDNA3", "CDNA4")
"""Architectures whose tables hold the best kernel of each size after tuning (hipBLASLt's library
logic), or that are extrapolated from those. The tables of MI100 hold what stock PyTorch ran."""
STOCK_PRODUCTS: Final = 1.3
"""Time of a product that nobody tuned relative to the tuned kernel: the share of the fp32 peak that
tuned products reach on MI210 (0.77, 13 sizes from 3e10 FLOPs on in hipBLASLt's library logic) over
that of PyTorch 2.4.1 on MI100 at such sizes. In mean 1.28 over the operators of models (32), as
geometric mean 1.36 over all sizes (738, NeuSight's tables). Products in 16 and 8 bits are taken to
lose as much."""


def framework_slowdown(framework: Framework, op: Op, device: Device) -> float:
    """Time of an event with a framework's kernels relative to the cost models' time for it."""
    if isinstance(op, Attention):
        return attention_slowdown(framework.attention, device, op)
    # A table of NVIDIA's devices was measured as frameworks run products, by the heuristic of
    # cuBLAS.
    is_stock = (
        isinstance(op, Gemm)
        and device.architecture in _TUNED_TABLES
        and not framework.tuned_products
    )
    return STOCK_PRODUCTS if is_stock else 1.0
