"""A launch file in the words of this package, and what the caller states in its place."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._harm import Harm
from perfmodel.ingest.launch._model import PARTS_OF_MODEL
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Cluster, Layout, Model, Problem, key_fields

JOB_FIELDS: Final = (
    "dtype",
    "flash_attention",
    "grad_dtype",
    "optimizer",
    "mode",
    "eager_kernels",
    "expert_dispatcher",
    "expert_capacity_factor",
    "einsum_dispatch",
    "adapter_dropout",
    "base_weights",
    "cuda_graphs",
    "recompute_modules",
    "fp8_activation_inputs",
    "operation_fuser",
    "fp8_recipe",
    "frozen",
    "adapter_rank",
    "adapter_modules",
    "bucket_bytes",
    "loss_with_gradient",
    "chunked_loss",
    "in_place_activation",
    "fp8_params",
    "secondary_shards",
)
"""Fields of `Job` other than batch and length that files state."""
LAYOUT_FIELDS: Final = tuple(key_fields(Layout))
BATCHES: Final = ("micro_batch", "local_batch", "device_batch", "grad_accum")
STATED_BY: Final = {"ep": "ep_most", "replicate": "shard_ranks", "vpp": "layers_per_chunk"}
"""Fields of the layout that follow from another field that a file may state instead."""
_BY_A_FLAG: Final = ("global_batch", "seq_len", "dtype")
"""Fields that the caller states by a separate flag."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of a launch file and the format that reads them."""

    form: LaunchFormat
    """The format, joined with those of the files that the launch file names."""
    entries: Entries
    commented: Fields
    """Fields of the layout that stand in a comment of an exported file."""
    stated: frozenset[str]
    """Names of the fields that the file states."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch file translated into this package's model, layout and job."""

    path: str
    format: str
    """Name of the format, such as `megatron` or `torchtitan`."""
    framework: str
    """Name of the framework, with `@year` where the file tells its generation."""
    model: Model | None
    layout: Layout | None
    devices: int | None
    global_batch: int | None
    """Sequences per step."""
    seq_len: int | None
    """Tokens per sequence."""
    job_fields: Mapping[str, Any]
    """Further fields of `Job` that the file states, by name."""
    assumed: tuple[str, ...] = ()
    """Settings that the file leaves open and that the framework or this package fills in, one
    sentence each."""
    may_be_wrong: tuple[str, ...] = ()
    """Facts about model, layout, precision or memory that may be wrong because a setting was not
    read, worst first."""
    ignored: tuple[str, ...] = ()
    """Settings of the file that could matter and were not understood, the worst first."""
    missing: tuple[str, ...] = ()
    """Facts that a prediction still needs, each in a sentence with the remedy."""
    reading: Reading | None = field(default=None, repr=False, compare=False)
    """Settings as the file has them, from which changes of the file follow."""

    def states(self, field: str) -> bool:
        """Whether the file states a field of the layout or of the job."""
        stated = self.reading.stated if self.reading else frozenset()
        if field == "micro_batch":
            # Frameworks that state the batch of a device or the accumulation leave no choice of it.
            return not stated.isdisjoint(BATCHES)
        return field in stated or STATED_BY.get(field) in stated

    def problem(self, cluster: Cluster | str) -> Problem:
        """The file's model and job on a cluster; with the layout, all that a prediction or a search
        needs.

        The framework's defaults complete the job.

        Raises:
            LaunchFileError: the file leaves the model or the batch open.
        """
        if self.model is None or self.global_batch is None:
            raise LaunchFileError(f"{self.path}: {'; '.join(self.missing)}")
        cluster = catalog.cluster(cluster) if isinstance(cluster, str) else cluster
        framework = catalog.framework(self.framework)
        job = framework.job(
            self.model,
            cluster.device,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            **self.job_fields,
        )
        return Problem(
            model=self.model, cluster=cluster, job=job, framework=framework, devices=self.devices
        )


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Settings of the caller, which override those of the file."""

    devices: int | None = None
    global_batch: int | None = None
    layout: str = ""
    """Layout in the notation of `Layout.parse`; keys that it leaves out are the file's."""
    model: Model | None = None
    seq_len: int | None = None
    dtype: str | None = None
    needs_layout: bool = True
    """Whether the caller needs the file's layout; if not, undefined values in it do not matter."""

    def states(self, field: str) -> bool:
        """Whether the caller sets a field of the file (`perfmodel.ingest.launch._table`)."""
        if field == "model" or field.startswith(PARTS_OF_MODEL):
            return self.model is not None
        if field in ("devices", "nodes"):
            return self.devices is not None
        is_of_layout = field in (*LAYOUT_FIELDS, "layers_per_chunk", "ep_most")
        return self.sets(field) or (is_of_layout and not self.needs_layout)

    def sets(self, field: str) -> bool:
        """Whether the caller sets a field of the layout or of the job."""
        if field in _BY_A_FLAG:
            return getattr(self, field) is not None
        # The notation of layouts knows `tp=8,pp=2` and Megatron's short form `8M2P16D` (model,
        # pipeline, data).
        names = {part.partition("=")[0].strip() for part in self.layout.split(",")}
        if re.match(r"\s*\d+M\d+P\d+D", self.layout, re.IGNORECASE):
            names |= {"tp", "pp", "dp"}
        return field in names

    @property
    def settled(self) -> tuple[Harm, ...]:
        """Parts of a prediction that the caller states, so that unread settings cannot make them
        wrong."""
        stated = {Harm.MODEL: self.model, Harm.PRECISION: self.dtype}
        return tuple(harm for harm, value in stated.items() if value is not None)
