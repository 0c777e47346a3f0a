"""Choices of runs that train experts: the dispatcher of tokens, whether tokens are dropped, and the
overlap of exchanges."""

from collections.abc import Sequence
from typing import Final

from perfmodel.validation.rows import Case
from perfmodel.validation.unstated._choice import OpenChoice, Variant, on_or_off
from perfmodel.validation.unstated._features import kind_of

_BEFORE_HOPPER: Final = frozenset(
    {"Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada"}
)
"""Architectures of NVIDIA without the asynchronous copies of tiles that HybridEP is written in, and
for which DeepEP is built without its features (DISABLE_SM90_FEATURES): it then runs inside a node
alone (deepseek-ai/DeepEP README, requirements and installation)."""
_DEEPEP_NVLINK_PEERS: Final = 8
"""Ranks that DeepEP's kernels reach by NVLink (deepseek-ai/DeepEP csrc/kernels/configs.cuh,
NUM_MAX_NVL_PEERS). In a rack whose trays share NVLink it would send between trays by adapters, and
NVIDIA's code refuses it there (Megatron-Bridge training/flex_dispatcher_backend.py,
validate_flex_dispatcher_backend: B200 and B300, not GB200)."""


class ExpertDispatcher(OpenChoice):
    """The dispatcher of tokens to experts, where the framework has several kinds."""

    name = "expert_dispatcher"
    takes_memory = False

    def matters(self, case: Case) -> bool:
        has_choice = len(case.framework.capabilities.expert_dispatchers) > 1 or self.stated(case)
        return has_choice and case.layout.ep > 1

    def stated(self, case: Case) -> bool:
        return "expert_dispatcher" in case.stated

    def value(self, case: Case) -> str:
        return case.job.experts.expert_dispatcher

    def variants(self, case: Case) -> Sequence[Variant]:
        names = case.framework.capabilities.expert_dispatchers
        if case.cluster.device.architecture in _BEFORE_HOPPER:
            names = tuple(name for name in names if name == "alltoall")
        if case.cluster.levels[0].size > _DEEPEP_NVLINK_PEERS:
            names = tuple(name for name in names if name != "deepep")
        return [Variant(value=name, job={"expert_dispatcher": name}) for name in names]


CAPACITY: Final = 1.25
"""Capacity of MaxText's recipes that drop tokens (benchmarks/maxtext_trillium_model_configs.py,
`mixtral_8x7b_dropped`)."""


class DroppedTokens(OpenChoice):
    """Whether experts accept all tokens, or only up to a capacity and drop the others.

    MaxText has model configurations of either kind for the same model, and no table says which one
    a run had, so both are equally likely. What drops tokens multiplies by masks
    (`Job.einsum_dispatch`).
    """

    name = "expert_capacity_factor"
    # Dropping changes what is learned: nobody chooses it by speed alone.
    tunable = False
    takes_memory = False

    def matters(self, case: Case) -> bool:
        has_experts = kind_of(case.model) == "moe" and case.job.mode == "train"
        return has_experts and case.framework.launch.drops_tokens_unsaid

    def stated(self, case: Case) -> bool:
        return "expert_capacity_factor" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.job.experts.expert_capacity_factor is not None)

    def variants(self, case: Case) -> Sequence[Variant]:
        dropping = {"expert_capacity_factor": CAPACITY, "einsum_dispatch": True}
        return [Variant(value="off"), Variant(value="on", job=dropping)]

    def usual(self, case: Case) -> str | None:
        return None


class ExpertOverlap(OpenChoice):
    """Whether expert exchanges overlap another micro-batch's pass, where supported."""

    name = "ep_overlap"
    takes_memory = False

    def matters(self, case: Case) -> bool:
        return case.layout.ep > 1 and (self._can_run(case) or self.stated(case))

    def _can_run(self, case: Case) -> bool:
        """Megatron-Core pairs the passes of two micro-batches, in pipelines those of two model
        chunks, and does not repeat whole layers meanwhile (megatron/training/arguments.py,
        overlap_moe_expert_parallel_comm)."""
        layout = case.layout
        pairs = layout.pp == 1 or layout.vpp > 1
        repeats_layers = layout.recompute == "full" or bool(layout.recompute_full_layers)
        return (
            case.framework.capabilities.pairs_passes
            and pairs
            and not repeats_layers
            and case.job.mode == "train"
        )

    def stated(self, case: Case) -> bool:
        return "ep_overlap" in case.stated

    def value(self, case: Case) -> str:
        return on_or_off(case.layout.overlap.ep_overlap)

    def variants(self, case: Case) -> Sequence[Variant]:
        return [
            Variant(value=on_or_off(choice), layout={"ep_overlap": choice})
            for choice in (True, False)
        ]
