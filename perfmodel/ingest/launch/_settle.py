"""Determines layout, model and job of a launch file: from its settings, else by defaults."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from perfmodel import catalog
from perfmodel.catalog import networks
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._assumptions import (
    assumptions,
    doubts_of_rules,
    ignored_settings,
    missing_model,
    missing_replicas,
)
from perfmodel.ingest.launch._format import LaunchFormat, Stated
from perfmodel.ingest.launch._harm import Unread, doubts
from perfmodel.ingest.launch._launch import JOB_FIELDS, LAYOUT_FIELDS, Launch, Overrides
from perfmodel.ingest.launch._model import model_of
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Framework, Layout, Model, Transformer, partition_by_cost
from perfmodel.spec.notation import with_drains

_CUT_BY_PIPELINES: Final = frozenset({"pipeline_micro_batch", "pipeline_micro_batches"})


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
    layout_fields = {key: value for key, value in stated.fields.items() if key in LAYOUT_FIELDS}
    framework_defaults = framework.layout_defaults(stated.defaults | layout_fields)
    default_micro_batch = framework_defaults.pop("micro_batch", 1)
    stated = replace(stated, defaults=stated.defaults | framework_defaults)
    known = stated.defaults | stated.fields

    # A file may leave the model or the devices open, since both are often given on the framework's
    # command line. Missing settings are collected, so that one error names them all.
    model = overrides.model or model_of(known, place, Path(place).name.partition(".")[0])
    missing = [] if model else [missing_model(known)]
    degrees = _degrees(
        known, overrides, place, accumulation_is_stated="grad_accum" in stated.fields
    )
    layout = None
    if degrees.dp is None:
        missing.append(missing_replicas(known, degrees.devices))
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
        assumed=assumptions(
            stated, overrides, framework.label, model, default_micro_batch, global_batch
        ),
        may_be_wrong=(
            *doubts_of_rules(known, overrides),
            *source_doubts,
            *doubts(unread, form.noun, overrides.settled),
        ),
        ignored=ignored_settings(unread, notes),
        missing=tuple(missing),
    )


def _micro_batch(known: Fields, local: int | None, place: str) -> int | None:
    """Sequences of a pass through the pipeline, as stated or from those of a replica; None where
    neither is known."""
    micro = known.get("micro_batch")
    pp = known.get("pp", 1)
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
    return micro


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
    accum = known.get("grad_accum")
    dp = known.get("dp")
    micro = known.get("micro_batch")
    total = known.get("global_batch")

    # The caller's devices with the file's model parallelism make other replicas than the file has.
    sets_degrees = any(overrides.sets(name) for name in ("tp", "pp", "cp"))
    if overrides.devices is not None and not sets_degrees:
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
    micro = _micro_batch(known, local, place)
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
    values = {name: known[name] for name in LAYOUT_FIELDS if name in known}
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
        if overrides.sets("dp"):
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
    is_cut = layout.partition is not None or overrides.sets("partition")
    if framework.launch.stages_by_cost and model is not None and not is_cut:
        layout = layout.replace(partition=partition_by_cost(model, layout.pp))
    if layout.recompute != "selective" or overrides.sets("recompute_full_layers"):
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
