"""The open choices of runs, in the order in which they are drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from perfmodel.catalog import cluster_for
from perfmodel.catalog.networks import ADAPTERS_NOT_STATED, REFERENCE_NETWORK, devices_of_adapters
from perfmodel.errors import PerfModelError
from perfmodel.spec import Transformer
from perfmodel.validation.rows import CONVERSATIONS, Case
from perfmodel.validation.unstated._choice import OpenChoice, Variant, on_or_off
from perfmodel.validation.unstated._encoder_choices import EncoderHead, EncoderLength, Padding
from perfmodel.validation.unstated._expert_choices import (
    DroppedTokens,
    ExpertDispatcher,
    ExpertOverlap,
)
from perfmodel.validation.unstated._features import kind_of
from perfmodel.validation.unstated._layout_choices import (
    ExpertTensorParallel,
    HostActivations,
    Recompute,
    SequenceParallel,
    Sharding,
    SlicesThatShard,
)

_BEFORE_FLASH_ATTENTION: Final = frozenset({"Kepler", "Maxwell", "Pascal", "Volta"})
"""NVIDIA architectures that FlashAttention does not support: the first generation needs Turing or
Ampere, the second Ampere (Dao-AILab/flash-attention README, installation)."""


class FlashAttention(OpenChoice):
    """Whether attention is fused; false on devices without FlashAttention."""

    name = "flash_attention"
    tunable = False
    chain = (("era",), ("era", "kind"), ("framework", "era"))

    def matters(self, case: Case) -> bool:
        return isinstance(case.model, Transformer)

    def stated(self, case: Case) -> bool:
        return "flash_attention" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.job.kernels.flash_attention)

    def variants(self, case: Case) -> Sequence[Variant]:
        unfused = Variant(value="off", job={"flash_attention": False, "fp8_attention": False})
        if case.cluster.device.architecture in _BEFORE_FLASH_ATTENTION:
            return [unfused]
        return [Variant(value="on", job={"flash_attention": True}), unfused]


CONVERSATION_TOKENS: Final = 1000
"""Assumed mean number of tokens of a conversation in a set for fine-tuning."""
_PACKED: Final = 0.75
"""Assumed share of runs that pack if most launch files of a trainer do (ModelScope SWIFT
examples/megatron: those with sequences of 8,192 tokens do, one with 2,048 does not)."""


class PackedConversations(OpenChoice):
    """Whether sequences are packed conversations, each attending to itself, or documents.

    Lengths that are exponentially distributed with mean m have the mean square 2 m^2, so that a
    token attends as in a sequence of 2 m tokens (`Job.attended_tokens`).
    """

    name = "packing"
    tunable = False
    takes_memory = False

    def matters(self, case: Case) -> bool:
        return isinstance(case.model, Transformer) and CONVERSATIONS in case.assumed

    def stated(self, case: Case) -> bool:
        return not {"mean_tokens", "rms_tokens"}.isdisjoint(case.stated)

    def value(self, case: Case) -> str:
        return "packed" if case.job.varied_lengths else "single"

    def variants(self, case: Case) -> Sequence[Variant]:
        lengths = "lengths of a trainer's sequences"
        seq_len = case.job.seq_len
        attended = min(seq_len, 2 * CONVERSATION_TOKENS)
        packed = {"rms_tokens": (seq_len * attended) ** 0.5}
        return [
            Variant(value="packed", counted_as=lengths, share=_PACKED, job=packed),
            Variant(value="single", counted_as=lengths, share=1 - _PACKED),
        ]

    def usual(self, case: Case) -> str | None:
        return None


class UnsaidSwitch(OpenChoice):
    """A switch of the job that no published run states, so both values are equally likely."""

    def stated(self, case: Case) -> bool:
        return self.name in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.job.value(self.name))

    def variants(self, case: Case) -> Sequence[Variant]:
        return [Variant(value=on_or_off(is_on), job={self.name: is_on}) for is_on in (False, True)]

    def usual(self, case: Case) -> str | None:
        return None


class ChunkedLoss(UnsaidSwitch):
    """Whether head and loss process the tokens in chunks, by Liger's kernels, which are those of
    norms, rotary embeddings and activations too (transformers integrations/liger.py,
    `apply_liger_kernel`)."""

    name = "chunked_loss"
    tunable = False

    def variants(self, case: Case) -> Sequence[Variant]:
        off, on = super().variants(case)
        liger = {"chunked_loss": True, "eager_kernels": (), "in_place_activation": True}
        return [off, replace(on, job=liger)]

    def matters(self, case: Case) -> bool:
        job = case.job
        # Only the logits of a whole vocabulary are large enough to be cut.
        is_language_model = isinstance(case.model, Transformer) and job.loss.head == "vocabulary"
        if not is_language_model or job.mode != "train":
            return False
        return case.framework.launch.chunks_loss_unsaid and not job.loss.loss_with_gradient


class Fp8ActivationInputs(UnsaidSwitch):
    """Whether inputs of activations are saved in 8 bits.

    The activation's own autograd function casts them, whatever type products have (Megatron-Core
    0.7 megatron/core/fusions/fused_bias_swiglu.py, `fp8_input_store`); asked for beside narrow
    products.
    """

    name = "fp8_activation_inputs"

    def matters(self, case: Case) -> bool:
        is_narrow = case.job.dtype in ("fp8", "fp4")
        return is_narrow and case.framework.capabilities.keeps_fp8_activation_inputs


class OperationFuser(UnsaidSwitch):
    """Whether Transformer Engine's operation fuser is on."""

    name = "operation_fuser"

    def matters(self, case: Case) -> bool:
        is_narrow = case.job.dtype in ("fp8", "fp4")
        return case.framework.launch.fuses_operations_unsaid and (
            is_narrow or case.job.fine_tuning.adapter_rank > 0
        )


class DataParallelOverlap(OpenChoice):
    """Whether gradient reductions and weight gathers overlap kernels, where supported."""

    name = "dp_overlap"
    takes_memory = False

    def matters(self, case: Case) -> bool:
        framework = case.framework
        can_hide = framework.communication.hides(case.layout.zero, case.layout.tp)
        hides = framework.default_layout.overlap.overlap_grad_reduce and can_hide
        return hides and case.layout.dp * case.layout.cp > 1 and case.job.mode == "train"

    def stated(self, case: Case) -> bool:
        return "overlap_grad_reduce" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.overlap.overlap_grad_reduce)

    def variants(self, case: Case) -> Sequence[Variant]:
        exposed = {"overlap_grad_reduce": False, "overlap_param_gather": False}
        return [Variant(value="on"), Variant(value="off", layout=exposed)]


class TensorParallelOverlap(OpenChoice):
    """Whether tensor-parallel collectives overlap matrix products, where supported."""

    name = "tp_overlap"
    takes_memory = False

    def matters(self, case: Case) -> bool:
        return case.layout.tp > 1 and (case.framework.cuts_collectives or self.stated(case))

    def stated(self, case: Case) -> bool:
        return "tp_overlap" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.overlap.tp_overlap)

    def variants(self, case: Case) -> Sequence[Variant]:
        return [
            Variant(value=on_or_off(choice), layout={"tp_overlap": choice})
            for choice in (True, False)
        ]


class CudaGraphs(OpenChoice):
    """Whether the host replays layers or the whole step from CUDA graphs, if the framework can."""

    name = "cuda_graphs"
    takes_memory = False

    def matters(self, case: Case) -> bool:
        return case.framework.capabilities.layer_graphs and case.framework.host.execution == "eager"

    def stated(self, case: Case) -> bool:
        return "cuda_graphs" in case.stated

    def value(self, case: Case) -> str:
        return case.job.kernels.cuda_graphs

    def variants(self, case: Case) -> Sequence[Variant]:
        has_experts = kind_of(case.model) == "moe"
        step = ("step",) if case.framework.capabilities.graphs_step(has_experts) else ()
        return [
            Variant(value=graphs, job={"cuda_graphs": graphs})
            for graphs in ("none", "layers", *step)
        ]


_RATES: Final = ("1", "1/2", "1/4", "1/8")
"""Rate of the network between nodes, relative to the maker's reference system, which has an adapter
for each device."""


class Network(OpenChoice):
    """Rate of the network between nodes, if the run does not determine it."""

    name = "network"
    tunable = False
    chain = (("vendor",), ("architecture",), ("scale",), ("fabric",))
    takes_memory = False

    def matters(self, case: Case) -> bool:
        levels = case.cluster.levels
        return len(levels) > 1 and not case.cluster.kinds and case.layout.devices > levels[0].size

    def stated(self, case: Case) -> bool:
        # A reference network was assumed whole; of the other kind the rate was stated, but not how
        # many adapters have it.
        return case.cluster.levels[-1].source not in (
            REFERENCE_NETWORK,
            ADAPTERS_NOT_STATED,
        )

    def value(self, case: Case) -> str:
        """The nearest of `_RATES`."""
        # Rates are counted relative to the maker's reference system, so that a fast fabric of
        # 2016 and one of 2024 are one value.
        cluster = case.cluster
        reference = cluster_for(cluster.device.name, cluster.levels[0].size, "", "").levels[-1]
        ratio = cluster.levels[-1].bandwidth_bytes_per_s / reference.bandwidth_bytes_per_s
        return min(_RATES, key=lambda rate: max(ratio / _ratio(rate), _ratio(rate) / ratio))

    def variants(self, case: Case) -> Sequence[Variant]:
        *inner, outer = case.cluster.levels
        rates = _RATES
        fastest = outer.bandwidth_bytes_per_s
        if outer.source == ADAPTERS_NOT_STATED:
            # The rate is read as a node's: with an adapter for each device they would have it each.
            sharing = devices_of_adapters(case.cluster)
            rates = tuple(rate for rate in _RATES if _ratio(rate) * sharing >= 1)
            fastest *= sharing
        variants = []
        for rate in rates:
            level = replace(outer, bandwidth_bytes_per_s=fastest * _ratio(rate), source="assumed")
            variants.append(
                Variant(value=rate, cluster=replace(case.cluster, levels=(*inner, level)))
            )
        return variants

    def usual(self, case: Case) -> str | None:
        return None


def _ratio(rate: str) -> float:
    """A rate of `_RATES` as a number."""
    over, _, under = rate.partition("/")
    return float(over) / float(under or 1)


OPEN_CHOICES: Final[tuple[OpenChoice, ...]] = (
    EncoderLength(),
    Sharding(),
    SlicesThatShard(),
    Recompute(),
    HostActivations(),
    SequenceParallel(),
    ExpertTensorParallel(),
    FlashAttention(),
    EncoderHead(),
    Padding(),
    PackedConversations(),
    ChunkedLoss(),
    Fp8ActivationInputs(),
    OperationFuser(),
    CudaGraphs(),
    ExpertDispatcher(),
    DroppedTokens(),
    DataParallelOverlap(),
    TensorParallelOverlap(),
    ExpertOverlap(),
    Network(),
)
"""Open choices in the order in which they are drawn: those that take memory first."""


def stated_values(case: Case) -> dict[str, str]:
    """Values that a run states, by choice."""
    stated = {}
    for choice in OPEN_CHOICES:
        try:
            if choice.matters(case) and choice.stated(case):
                stated[choice.name] = choice.value(case)
        except PerfModelError:
            continue
    return stated
