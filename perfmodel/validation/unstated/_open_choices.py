"""The open choices of runs, in the order in which they are drawn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from perfmodel.catalog import cluster_for
from perfmodel.catalog.networks import ADAPTERS_NOT_STATED, REFERENCE_NETWORK, devices_of_adapters
from perfmodel.errors import PerfModelError
from perfmodel.spec import RecomputeModule, Transformer
from perfmodel.validation.rows import CONVERSATIONS, COPIES_TO_HOST, Case
from perfmodel.validation.unstated._choice import OpenChoice, Variant, on_or_off
from perfmodel.validation.unstated._encoder_choices import EncoderHead, EncoderLength, Padding
from perfmodel.validation.unstated._expert_choices import (
    DroppedTokens,
    ExpertDispatcher,
    ExpertOverlap,
)
from perfmodel.validation.unstated._features import kind_of

SHARES_OF_LAYERS: Final = (0.25, 0.5, 0.75)
"""Shares of a stage's layers that a run may recompute in full, other than all of them."""
_WHOLE_STAGES: Final = 0.5
"""Assumed share of runs with full recompute that recompute all layers; tables also write `full` for
some layers."""


class Recompute(OpenChoice):
    """Recomputation: none, parts of layers, some layers, or all layers."""

    name = "recompute"
    # People with memory to spare do not recompute.
    chain = (("size",), ("size", "era"), ("need",), ("framework",))

    def matters(self, case: Case) -> bool:
        return (
            isinstance(case.model, Transformer)
            and case.job.mode == "train"
            and not case.layout.offload_layers
        )

    def stated(self, case: Case) -> bool:
        return case.recompute_stated

    def value(self, case: Case) -> str:
        return "full" if case.layout.recompute_full_layers else case.layout.recompute

    def variants(self, case: Case) -> Sequence[Variant]:
        framework = case.framework

        # Modes that the framework has. `full` may also mean some of the layers, which tables do
        # not tell apart.
        modes = framework.capabilities.recomputes
        variants = [
            Variant(value=mode, layout={"recompute": mode}) for mode in modes if mode != "full"
        ]
        if "full" not in modes:
            return variants
        # A compiled step recomputes by one policy for all layers.
        partly: list[Variant] = []
        if framework.host.execution != "compiled" and isinstance(case.model, Transformer):
            partly = self._partly(case.model.layers, case.layout.pp)
        share = _WHOLE_STAGES if partly else 1.0
        variants.append(Variant(value="full", layout={"recompute": "full"}, share=share))
        return [*variants, *partly]

    def _partly(self, layers: int, stages: int) -> list[Variant]:
        """Full recompute of some layers of every stage."""
        per_stage = -(-layers // stages)

        # A few shares of a stage's layers stand for all numbers of layers.
        numbers = sorted({round(per_stage * share) for share in SHARES_OF_LAYERS} - {0, per_stage})
        variants = []
        for number in numbers:
            variants.append(
                Variant(
                    value=f"full in {number} of {per_stage} layers",
                    counted_as="full",
                    share=(1 - _WHOLE_STAGES) / len(numbers),
                    layout={"recompute": "none", "recompute_full_layers": (number,)},
                )
            )
        return variants


class HostActivations(OpenChoice):
    """Whether a compiled step with a custom policy (`remat_policy: custom`) offloads activations.

    Such a policy names tensors that stay on the device, go to the host or are computed again
    (MaxText configs/base.yml, `decoder_layer_input` and following). On the host go the inputs of
    layers and the products of attention; the rest of a layer is repeated, attention too, since the
    names hold none of its kernel's results. These tensors were read in recipes of Trillium
    (AI-Hypercomputer/tpu-recipes@10ca5b92 training/trillium/Llama3.1-8B-MaxText/v6e-8/README.md)
    with their times in view. No table says how many policies do so, so both are equally likely.
    """

    name = "activations_on_host"

    def matters(self, case: Case) -> bool:
        # Where the device's link to the host is not known, nobody knows what copies cost.
        layout, framework = case.layout, case.framework
        link_is_known = case.cluster.device.host_bandwidth_bytes_per_s is not None
        if not framework.capabilities.offloads or not link_is_known:
            return False
        if not isinstance(case.model, Transformer) or case.job.mode != "train":
            return False

        # The choice exists for compiled steps without a pipeline.
        is_open = COPIES_TO_HOST in case.assumed and layout.recompute == "full"
        return is_open and framework.host.execution == "compiled" and layout.pp == 1

    def stated(self, case: Case) -> bool:
        return False

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.offload_layers > 0)

    def variants(self, case: Case) -> Sequence[Variant]:
        if not isinstance(case.model, Transformer):
            raise PerfModelError(
                f"{self.name}: {case.model.name} has no layers whose activations go to the host"
            )
        feed_forward: RecomputeModule = "mlp" if case.model.experts is None else "moe"
        # All layers but one: the last one's backward begins at once.
        on_host = {"recompute": "selective", "offload_layers": case.model.layers - 1}
        repeated = {"recompute_modules": ("core_attn", "layernorm", feed_forward)}
        return [Variant(value="off"), Variant(value="on", layout=on_host, job=repeated)]

    def usual(self, case: Case) -> str | None:
        return None


class Sharding(OpenChoice):
    """The stage of ZeRO (3: as fully sharded data parallelism)."""

    name = "zero"
    chain = (("stages",), ("stages", "size"), ("framework",))

    def matters(self, case: Case) -> bool:
        # States are sharded over the ranks that hold the same weights: replicas, and the ranks
        # among which sequences are cut.
        return case.layout.dp * case.layout.cp > 1 and case.job.mode == "train"

    def stated(self, case: Case) -> bool:
        return "zero" in case.stated

    def value(self, case: Case) -> str:
        return str(case.layout.zero)

    def variants(self, case: Case) -> Sequence[Variant]:
        # Several frameworks refuse ZeRO stages in pipelines that they run without (DeepSpeed
        # runtime/pipe/engine.py: 2 and 3 are incompatible with pipeline parallelism).
        capabilities = case.framework.capabilities
        if case.layout.pp > 1:
            stages = capabilities.zero_stages_in_pipelines
        else:
            stages = capabilities.zero_stages
        return [Variant(value=str(stage), layout={"zero": stage}) for stage in stages]


class SlicesThatShard(OpenChoice):
    """Whether each TPU slice holds all model states, or all slices share one sharded copy.

    XLA's frameworks shard over the links of a slice and copy over the network between slices unless
    asked for more (MaxText configs/base.yml: `ici_fsdp_parallelism` and `dcn_data_parallelism` are
    the axes of -1).
    """

    name = "replicate"

    def matters(self, case: Case) -> bool:
        layout, cluster = case.layout, case.cluster
        is_sharded = layout.zero == 3 and layout.pp == 1 and case.job.mode == "train"
        return is_sharded and cluster.device.vendor == "Google" and self._slices(case) > 1

    def stated(self, case: Case) -> bool:
        return "replicate" in case.stated

    def value(self, case: Case) -> str:
        return "one slice" if case.layout.replicate > 1 else "all slices"

    def variants(self, case: Case) -> Sequence[Variant]:
        together = Variant(value="all slices", layout={"replicate": 1})
        slices = self._slices(case)
        if case.layout.dp % slices:
            return [together]
        return [Variant(value="one slice", layout={"replicate": slices}), together]

    def usual(self, case: Case) -> str | None:
        return "one slice"

    @staticmethod
    def _slices(case: Case) -> int:
        return -(-case.layout.devices // case.cluster.levels[0].size)


class SequenceParallel(OpenChoice):
    """Whether norms are sharded over tensor-parallel ranks along the sequence."""

    name = "sequence_parallel"

    def matters(self, case: Case) -> bool:
        return case.layout.tp > 1 and isinstance(case.model, Transformer)

    def stated(self, case: Case) -> bool:
        return "sequence_parallel" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.sequence_parallel)

    def variants(self, case: Case) -> Sequence[Variant]:
        choices = case.framework.capabilities.sequence_parallel_choices
        return [
            Variant(value=on_or_off(choice), layout={"sequence_parallel": choice})
            for choice in choices
        ]


class ExpertTensorParallel(OpenChoice):
    """Whether tensor parallelism shards experts too."""

    name = "etp"

    def matters(self, case: Case) -> bool:
        return case.layout.tp > 1 and kind_of(case.model) == "moe"

    def stated(self, case: Case) -> bool:
        return "etp" in case.stated

    def value(self, case: Case) -> str:
        return "tp" if case.layout.expert_tp == case.layout.tp else "1"

    def variants(self, case: Case) -> Sequence[Variant]:
        return [
            Variant(value="tp", layout={"etp": case.layout.tp}),
            Variant(value="1", layout={"etp": 1}),
        ]


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
        hides = framework.default_layout.overlap_grad_reduce and can_hide
        return hides and case.layout.dp * case.layout.cp > 1 and case.job.mode == "train"

    def stated(self, case: Case) -> bool:
        return "overlap_grad_reduce" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.overlap_grad_reduce)

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
        return on_or_off(case.layout.tp_overlap)

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
