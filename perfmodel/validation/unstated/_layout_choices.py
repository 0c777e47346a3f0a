"""Open choices of how a run lies on its devices: recomputation, sharding, and what tensor-parallel
ranks share."""

from collections.abc import Sequence
from typing import Final

from perfmodel.errors import PerfModelError
from perfmodel.spec import RecomputeModule, Transformer
from perfmodel.validation.rows import COPIES_TO_HOST, Case
from perfmodel.validation.unstated._choice import OpenChoice, Variant, on_or_off
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
