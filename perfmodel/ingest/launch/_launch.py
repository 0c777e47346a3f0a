"""Turns a file's settings into a model, a layout and a job, and lists what was filled in and what
is missing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from perfmodel import catalog
from perfmodel.catalog import networks
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat, Stated
from perfmodel.ingest.launch._harm import SUBJECTS, Harm, Unread, doubts
from perfmodel.ingest.launch._model import PARTS_OF_MODEL, model_of
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import (
    Cluster,
    Framework,
    Layout,
    Model,
    Problem,
    Transformer,
    partition_by_cost,
)
from perfmodel.spec.notation import with_drains
from perfmodel.units import plural

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
_LAYOUT: Final = tuple(f.name for f in fields(Layout))
_CUT_BY_PIPELINES: Final = frozenset({"pipeline_micro_batch", "pipeline_micro_batches"})
_BATCHES: Final = ("micro_batch", "local_batch", "device_batch", "grad_accum")
_SAID: Final = (
    *_LAYOUT,
    *JOB_FIELDS,
    "seq_len",
    "global_batch",
    "grad_accum",
    "local_batch",
    "device_batch",
    "nodes",
)
"""Fields whose defaults are reported."""


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
            return not stated.isdisjoint(_BATCHES)
        return field in stated

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
        is_of_layout = field in (*_LAYOUT, "layers_per_chunk", "ep_most")
        return _has(self, field) or (is_of_layout and not self.needs_layout)

    @property
    def settled(self) -> tuple[Harm, ...]:
        """Parts of a prediction that the caller states, so that unread settings cannot make them
        wrong."""
        stated = {Harm.MODEL: self.model, Harm.PRECISION: self.dtype}
        return tuple(harm for harm, value in stated.items() if value is not None)


@dataclass(frozen=True)
class _Degrees:
    """Replicas, devices and batches, as stated in the file or derived from one another."""

    dp: int | None
    devices: int | None
    micro_batch: int | None
    global_batch: int | None
    drains: int = 1
    """How often a step runs through the pipeline (`1f1b*4`)."""


def settle(
    stated: Stated,
    overrides: Overrides,
    *,
    place: str,
    form: LaunchFormat,
    framework_name: str,
    unread: tuple[Unread, ...],
    notes: tuple[str, ...],
    source_doubts: tuple[str, ...] = (),
) -> Launch:
    """Determine layout, model and job: from the file, else by the framework's defaults.

    Args:
        place: path of the file; also the name of a model that the catalog does not have.
        form: the file's format.
        framework_name: framework whose defaults apply besides the format's.
        unread: settings that were not understood, the worst first.
        notes: parts of the file that were not read, one sentence each.
        source_doubts: sentences on settings that may be wrong because the file alone does not state
            them.

    Raises:
        LaunchFileError: numbers that contradict one another; names them.
    """
    # A field's value comes from the file's keys, else from the format's table, else from the
    # framework's defaults. The last are looked up with the file's settings because some depend on
    # these, such as ZeRO and the schedule on pp.
    framework = catalog.framework(framework_name)
    layout_fields = {key: value for key, value in stated.fields.items() if key in _LAYOUT}
    framework_defaults = framework.layout_defaults(stated.defaults | layout_fields)
    default_micro_batch = framework_defaults.pop("micro_batch", 1)
    stated = replace(stated, defaults=stated.defaults | framework_defaults)
    known = stated.defaults | stated.fields

    # A file may leave the model or the devices open, since both are often given on the framework's
    # command line. Missing settings are collected, so that one error names them all.
    model = overrides.model or model_of(known, place, Path(place).name.partition(".")[0])
    missing = [] if model else [_no_model(known)]
    degrees = _degrees(
        known, overrides, place, accumulation_is_stated="grad_accum" in stated.fields
    )
    layout = None
    if degrees.dp is None:
        missing.append(_no_replicas(known, degrees.devices))
    else:
        if not degrees.micro_batch:
            degrees = replace(degrees, micro_batch=default_micro_batch)
        layout = _as_it_runs(
            _layout(known, overrides, degrees, model, place), known, overrides, model, framework
        )
    global_batch = overrides.global_batch or degrees.global_batch
    if global_batch is None:
        missing.append("the file does not state the global batch; give --global-batch")
    job_fields = {key: known[key] for key in JOB_FIELDS if key in known}
    if overrides.dtype is not None:
        job_fields["dtype"] = overrides.dtype
    return Launch(
        path=place,
        format=form.name,
        framework=framework_name,
        model=model,
        layout=layout,
        devices=layout.devices if layout else overrides.devices or degrees.devices,
        global_batch=global_batch,
        seq_len=overrides.seq_len or known.get("seq_len"),
        job_fields=job_fields,
        assumed=_assumptions(
            stated, overrides, framework.label, model, default_micro_batch, global_batch
        ),
        may_be_wrong=(
            *_stated_doubts(known, overrides),
            *source_doubts,
            *doubts(unread, form.noun, overrides.settled),
        ),
        ignored=_ignored(unread, notes),
        missing=tuple(missing),
    )


def _assumptions(
    stated: Stated,
    overrides: Overrides,
    framework_label: str,
    model: Model | None,
    default_micro_batch: int,
    global_batch: int | None,
) -> tuple[str, ...]:
    """A sentence for each setting that neither the file nor the caller states, with the flag that
    sets it.

    Args:
        framework_label: the framework whose defaults were filled in.
        model: the settled model.
        default_micro_batch: the framework's default.
        global_batch: the settled global batch.
    """
    known = stated.defaults | stated.fields
    assumed = _assumed(stated, overrides, framework_label)
    assumed += [
        text for key, text in known.items() if key.startswith("note.") and key != "note.vocabulary"
    ]
    # A model that is given or named has its own vocabulary, whatever the name of the tokenizer.
    if model is not None and overrides.model is None and "model" not in known:
        assumed += [*_assumed_sizes(stated, framework_label), *_assumed_vocabulary(stated)]
    if not any(key in known for key in _BATCHES) and not _has(overrides, "micro_batch"):
        assumed.append(
            f"micro_batch={default_micro_batch} (the file does not state it; --layout micro_batch=N sets another)"
        )
    if (
        global_batch is not None
        and not overrides.global_batch
        and not {"global_batch", "grad_accum"} & set(known)
    ):
        assumed.append(
            f"global_batch={global_batch} (the file states no accumulation; --global-batch sets another)"
        )
    if model is not None and "seq_len" not in known and overrides.seq_len is None:
        assumed.append(
            f"seq_len={model.seq_len:,} (the file does not state it; this is the length of {model.name}; "
            "--seq-len sets another)"
        )
    return tuple(assumed)


def _stated_doubts(known: Fields, overrides: Overrides) -> list[str]:
    """Doubts stated by rules of the format, except about settings that the caller states."""
    settled = tuple(SUBJECTS[harm] for harm in overrides.settled)
    stated_doubts = []
    for key, text in known.items():
        if key.startswith("doubt.") and not (settled and text.startswith(settled)):
            stated_doubts.append(text)
    return stated_doubts


def _ignored(unread: Sequence[Unread], notes: Sequence[str]) -> tuple[str, ...]:
    """Settings that were not understood and parts that were not read, those that only cost some
    time last."""
    worst = [str(setting) for setting in unread if setting.harm < Harm.TIME]
    costing_time = [str(setting) for setting in unread if setting.harm is Harm.TIME]
    # Readers stop after the first lines of a list; an unread kernel option
    # costs percents, an unread model key everything.
    return (*worst, *notes, *costing_time)


def _no_model(known: Fields) -> str:
    if "model" in known:
        return f"the catalog has no model {known['model']!r}; give --model with its config.json or a TOML"
    return "the file does not state the model; give --model"


def _no_replicas(known: Fields, devices: int | None) -> str:
    if devices is None:
        return "the file does not state the number of devices; give --devices"
    tp, cp, pp = (known.get(name, 1) for name in ("tp", "cp", "pp"))
    return f"{devices} devices are not a multiple of its tp*cp*pp = {tp}*{cp}*{pp}; give --devices or --layout"


def _assumed(stated: Stated, overrides: Overrides, default_name: str) -> list[str]:
    filled = []
    for key, value in stated.defaults.items():
        # Two batches that are stated leave no choice of the accumulation between them.
        follows = key == "grad_accum" and {"global_batch", "micro_batch"} <= stated.fields.keys()
        if key in _SAID and key not in stated.fields and not follows and not _has(overrides, key):
            shown_value = str(value).lower() if isinstance(value, bool) else value
            filled.append(f"{key}={shown_value}")
    if not filled:
        return []
    return [f"{', '.join(filled)} ({default_name}'s {plural('default', len(filled))})"]


_SIZES: Final = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")


def _assumed_sizes(stated: Stated, default_name: str) -> list[str]:
    """A sentence on sizes of the model that the framework fills in."""
    filled = [
        f"{name}={stated.defaults[f'model.{name}']}"
        for name in _SIZES
        if f"model.{name}" in stated.defaults and f"model.{name}" not in stated.fields
    ]
    if filled:
        return [f"a model of {', '.join(filled)} ({default_name}'s own sizes; --model sets others)"]
    return []


def _assumed_vocabulary(stated: Stated) -> list[str]:
    """A sentence on a vocabulary that follows from the tokenizer's name, or that the framework
    fills in."""
    if "note.vocabulary" in stated.fields:
        return [stated.fields["note.vocabulary"]]
    if "model.vocab" in stated.fields or "model.vocab" not in stated.defaults:
        return []
    size = stated.defaults["model.vocab"]
    return [
        f"a vocabulary of {size:,} (the file names no tokenizer of known size; --model sets another)"
    ]


_OF_CALLER: Final = ("global_batch", "seq_len", "dtype")
"""Fields that the caller states by a separate flag."""


def _has(overrides: Overrides, key: str) -> bool:
    """Whether the caller states a field of the layout or of the job."""
    if key in _OF_CALLER:
        return getattr(overrides, key) is not None
    # The notation of layouts knows `tp=8,pp=2` and Megatron's short form `8M2P16D` (model,
    # pipeline, data).
    stated = {part.partition("=")[0].strip() for part in overrides.layout.split(",")}
    if re.match(r"\s*\d+M\d+P\d+D", overrides.layout, re.IGNORECASE):
        stated |= {"tp", "pp", "dp"}
    return key in stated


def _degrees(
    known: Fields, overrides: Overrides, place: str, *, accumulation_is_stated: bool
) -> _Degrees:
    """Fill in replicas, devices and batches that the file leaves open from those that it states.

    devices = dp * tp * pp * cp, and global batch = micro-batch * accumulation * dp.
    """
    # Experts are spread over ranks that exist already (replicas or
    # tensor-parallel ones), so that ep multiplies nothing.
    pp = known.get("pp", 1)
    group = known.get("tp", 1) * pp * known.get("cp", 1)
    devices = overrides.devices or known.get("devices")
    accum, dp = known.get("grad_accum"), known.get("dp")
    micro, total = known.get("micro_batch"), known.get("global_batch")

    # The caller's devices with the file's model parallelism make other replicas than the file has.
    if overrides.devices is not None and not any(
        _has(overrides, name) for name in ("tp", "pp", "cp")
    ):
        dp = None
    # Replicas follow from the devices where these are known; only files that state neither leave it
    # to the batches.
    if dp is None and devices is not None:
        if devices % group and not overrides.layout:
            return _Degrees(None, devices, micro, total)
        dp = max(1, devices // group)
    # Without devices, batches tell the replicas: global = local * accumulation * dp. An
    # accumulation that is only a default follows itself from the number of replicas.
    local = known.get("local_batch")
    if dp is None and total and accum and accumulation_is_stated and (local or micro):
        dp = total // ((local or micro) * accum)
    if dp is None:
        return _Degrees(None, None, micro, total)

    # Frameworks differ in what they call a batch: of a device, of a replica, or of a pass through
    # the pipeline.
    if local is None and "device_batch" in known:
        local = _whole_quotient(known["device_batch"] * group, place, "sequences per replica")
    if micro is None and local is not None:
        # With a pipeline, a replica's samples between two accumulations pass through it in several
        # pieces.
        micro = local
        if pp > 1 and "pipeline_micro_batches" in known:
            micro = _whole_quotient(
                local / known["pipeline_micro_batches"],
                place,
                "sequences per micro-batch of the pipeline",
            )
    if pp > 1 and "pipeline_micro_batch" in known:
        micro = known["pipeline_micro_batch"]
    per_pass = local or micro
    if total is None and per_pass is not None:
        total = per_pass * dp * (accum or 1)
    if micro is None and total is not None and accum is not None:
        micro = _whole_quotient(
            total / (dp * accum), place, "global batch / (replicas * accumulation)"
        )

    # A pipeline that cuts the batch of a replica is run through once for each accumulation. On
    # other numbers of devices than the file is for, batches may not divide one another.
    drains = 1
    if pp > 1 and local is not None and total and not _CUT_BY_PIPELINES.isdisjoint(known):
        runs, remainder = divmod(total, dp * local)
        drains = max(1, runs) if not remainder else 1
    return _Degrees(dp, dp * group, micro, total, drains)


def _whole_quotient(number: float, place: str, description: str) -> int:
    if number < 1 or not float(number).is_integer():
        raise LaunchFileError(
            f"{place}: {description} is {number:g}, which is not a whole number; change the batch sizes"
        )
    return int(number)


def _layout(
    known: Fields, overrides: Overrides, degrees: _Degrees, model: Model | None, place: str
) -> Layout:
    """The layout of the file with the caller's changes.

    Raises:
        LaunchFileError: degrees that do not divide the devices or the layers, or that no layout can
            have.
    """
    values = {name: known[name] for name in _LAYOUT if name in known}
    # dp is the one degree that most files leave to be computed from the number of processes.
    values["dp"] = degrees.dp
    if degrees.micro_batch:
        values["micro_batch"] = degrees.micro_batch
    if degrees.drains > 1:
        one_run = values.get("schedule", Layout.schedule)
        values["schedule"] = with_drains(one_run, degrees.drains)
    # Megatron states the interleaving by layers per virtual stage, which is a number of chunks only
    # for a known model.
    per_chunk = known.get("layers_per_chunk")
    if per_chunk:
        layers = getattr(model, "layers", None)
        pp = values.get("pp", 1)
        if layers is None or layers % (pp * per_chunk):
            raise LaunchFileError(
                f"{place}: {layers or 'unknown'} layers cannot be divided into chunks of {per_chunk} on {pp} "
                "pipeline stages; give --layout vpp=N"
            )
        values["vpp"] = layers // (pp * per_chunk)
    # Without a pipeline there is nothing to interleave: frameworks ignore the setting.
    if values.get("pp", 1) == 1:
        values["vpp"] = 1
    # These frameworks divide the replicas by the experts' degree, and cut a degree that exceeds
    # them.
    if "ep_most" in known and degrees.dp:
        values["ep"] = min(known["ep_most"], degrees.dp * values.get("cp", 1))
    if "shard_ranks" in known and degrees.dp:
        values["replicate"] = _copies(known, degrees.dp, place)
    try:
        if not overrides.layout:
            return Layout(**values)
        if _has(overrides, "dp"):
            return Layout.parse(overrides.layout, **values)
        # The caller's tensor, context and pipeline degrees leave other replicas on the same
        # devices. The degrees are parsed once with harmless values for all that must divide dp,
        # then again with the dp that follows.
        changed = Layout.parse(
            overrides.layout, **(values | {"ep": 1, "etp": None, "replicate": 1, "dp": 1})
        )
        group = changed.tp * changed.cp * changed.pp
        devices = degrees.devices or group
        if devices % group:
            raise LaunchFileError(
                f"{place}: {devices} devices are not a multiple of tp*cp*pp = {group} in --layout; give dp or --devices"
            )
        return Layout.parse(overrides.layout, **(values | {"dp": devices // group}))
    except LaunchFileError:
        raise
    except PerfModelError as error:
        raise LaunchFileError(f"{place}: {error}") from None


def _copies(known: Fields, dp: int, place: str) -> int:
    """Number of groups of replicas that shard states, from the replicas per group."""
    ranks = known["shard_ranks"]
    # hybrid sharding: states are sharded inside a node and copied between nodes (ZeRO++'s hpZ,
    # FSDP's HYBRID_SHARD).
    if ranks == "node":
        nodes_are_stated = "devices" in known and "nodes" in known
        per_node = (
            known["devices"] // known["nodes"] if nodes_are_stated else networks.DEVICES_PER_NODE
        )
        ranks = max(1, per_node // (known.get("tp", 1) * known.get("cp", 1)))
    if ranks < dp and dp % ranks:
        raise LaunchFileError(
            f"{place}: {dp} replicas cannot be divided into groups of {ranks} that shard weights; change the degrees"
        )
    return max(1, dp // ranks)


def _as_it_runs(
    layout: Layout, known: Fields, overrides: Overrides, model: Model | None, framework: Framework
) -> Layout:
    """The layout with the framework's own choices for fields that neither the file nor the caller
    states.

    Some frameworks cut pipeline stages by the cost of layers, and some repeat whole layers in
    selective recompute.
    """
    is_cut = layout.partition is not None or _has(overrides, "partition")
    if framework.launch.stages_by_cost and model is not None and not is_cut:
        layout = layout.replace(partition=partition_by_cost(model, layout.pp))
    if layout.recompute != "selective" or _has(overrides, "recompute_full_layers"):
        return layout
    # "Selective" means parts of every layer, or every n-th layer as a whole where the file says so.
    if isinstance(model, Transformer) and known.get("selective_every"):
        full_layers = max(
            1, round(model.layers / (layout.pp * layout.vpp) / known["selective_every"])
        )
        return layout.replace(recompute="none", recompute_full_layers=(full_layers,))

    # Where it does not, the framework's own record knows which of the two is meant.
    framework_layout, _ = framework.layout(
        f"pp={layout.pp},vpp={layout.vpp},recompute=selective", model
    )
    return layout.replace(
        recompute=framework_layout.recompute,
        recompute_full_layers=framework_layout.recompute_full_layers,
    )
