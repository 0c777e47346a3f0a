"""Frameworks without the facts that were looked up with results in view, so that intervals are
fitted to honest errors.

What `not_blind` lists of frameworks is a field of `perfmodel.spec.Framework` each; without it a
framework is as `generic`. What it lists of kernels, power, networks, memory and of how rows are
read cannot be undone so: it is of the cost models and of the reader, which hold for every run.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from perfmodel import catalog
from perfmodel.spec import Framework

FIELDS_IN_VIEW: Final[Mapping[str, Sequence[str]]] = {
    "nanotron": (
        "forward_bookkeeping",
        "backward_bookkeeping",
        "half_gradients",
        "all_reduce_gradients",
        "zero_overlaps",
        "keeps_outputs",
        "blocking_sends",
        "checks_collectives",
    ),
    "nemo": ("tp_overlap", "tp_overlap_copies", "grouped_launch_s", "zero"),
    "megatron-bridge": ("tp_overlap", "tp_overlap_copies", "grouped_launch_s"),
    "megatron-lm": ("grad_dtype", "fp8_copy_bytes"),
    "megatron-deepspeed": ("grad_dtype", "half_gradients"),
    "megatron-deepspeed-gaudi": ("execution", "recompute"),
    "deepspeed-gaudi": ("execution",),
    "pax": ("zero", "recompute"),
    "pax-te": ("zero", "recompute"),
    "internevo": ("all_reduce_gradients", "attention"),
    "fsdp": ("grad_dtype",),
    "fsdp-compile": ("grad_dtype",),
    "llm-foundry": ("grad_dtype",),
    "oneflow": ("tp_overlaps", "masked_head", "fused_batch_norm", "eager_kernels"),
    "tensorflow": ("masked_head", "eager_kernels"),
    "tensorflow-xla": ("masked_head", "fused_batch_norm", "eager_kernels"),
    "paddlepaddle": ("masked_head", "eager_kernels"),
    "mxnet": ("masked_head", "eager_kernels"),
    "pytorch": (
        "eager_kernels",
        "ddp_buckets",
        "bucket_bytes",
        "length_bin_tokens",
        "masked_head",
        "channels_last",
    ),
}
"""By framework, the fields whose values were looked up, or chosen, with errors of published runs in
view."""


class FactsInView:
    """Facts that were looked up with the results of some sources in view."""

    def __init__(self, sources: Collection[str]) -> None:
        self.sources = frozenset(sources)

    def looked_at(self, source: str) -> bool:
        """Whether anything was looked up with the results of a source in view; `source` may name
        its submitter."""
        return source in self.sources or source.partition(" (")[0] in self.sources

    def undo(self, source: str, framework: Framework) -> Framework | None:
        """The framework without such facts; None if it has none, or the source was not in view."""
        names = FIELDS_IN_VIEW.get(framework.name, ())
        if not names or not self.looked_at(source):
            return None
        # What nobody looked up is as for a framework that nobody named.
        generic = catalog.framework("generic")
        plain: dict[str, Any] = {name: generic.value(name) for name in names}
        return framework.replace(**plain)
