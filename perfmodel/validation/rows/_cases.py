"""Converts published rows to models, clusters, jobs and layouts, and tables to runs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel import catalog
from perfmodel.calibration import Run
from perfmodel.errors import PerfModelError, TableError
from perfmodel.prediction import check_layout, check_machine
from perfmodel.spec import Cluster, Device, Framework, Job, Layout, Model, Transformer
from perfmodel.spec.notation import written
from perfmodel.units import GB
from perfmodel.validation.rows._cells import (
    FROM_OTHERS,
    Row,
    Unusable,
    count,
    missing_columns,
    not_a_table_of_runs,
    number,
    read_rows,
    spread_of,
    text,
)
from perfmodel.validation.rows._keys import (
    CONTRADICTIONS,
    job_values,
    key_tables,
    rows_of,
    with_framework_keys,
    with_plain_columns,
)
from perfmodel.validation.rows._layout_words import (
    leaves_policy_open,
    offloads_activations,
    recompute_of,
    schedule_of,
)
from perfmodel.validation.rows._model import model_of
from perfmodel.validation.rows._own_runs import has_words_of_predict, own_run, require_words
from perfmodel.validation.rows._recipe import RowRecipe, recipe_of
from perfmodel.validation.rows._stated import stated_job, stated_layout, with_layout_keys
from perfmodel.validation.rows._user_columns import with_columns_of_runs
from perfmodel.validation.rows._words import (
    adapter_rank_of,
    adapters_of,
    contradictions_in_words,
    dtype_of,
    framework_name,
    may_pack_conversations,
    network_of,
    seq_len_of,
    unread_words,
)
from perfmodel.workload import parameter_count

if TYPE_CHECKING:
    import pandas as pd

COPIES_TO_HOST: Final = "copies of activations to the host"
"""Entry of `Case.assumed` for runs that may copy activations to the host but do not state it."""
CONVERSATIONS: Final = "lengths of packed conversations"
"""Entry of `Case.assumed` for trainers that pack conversations of unknown length."""


@dataclass(frozen=True)
class Case:
    """One published run, ready to predict."""

    case_id: str
    model: Model
    cluster: Cluster
    job: Job
    layout: Layout
    framework: Framework
    assumed: tuple[str, ...] = ()
    """Names of settings that the row does not determine, so that values were assumed."""
    contradictions: tuple[str, ...] = ()
    """Cells that contradict each other about a setting, one sentence each; the value of the first
    cell named is used."""
    stated_layout: str = ""
    """The part of the layout that the run states, in a layout's notation; the framework's defaults
    complete it."""
    stated_job: frozenset[str] = frozenset()
    """Names of the fields of the job that the run states."""

    @property
    def stated(self) -> frozenset[str]:
        """Names of the layout and job fields that the run states."""
        return frozenset(Layout.stated(self.stated_layout)) | self.stated_job

    @property
    def recompute_stated(self) -> bool:
        """Whether the run states its recomputation."""
        return not {"recompute", "recompute_full_layers"}.isdisjoint(self.stated)

    def relaid(self, **changes: Any) -> "Case":
        """The case with some layout fields changed, and the framework's defaults for the rest.

        Raises:
            LayoutError: a layout that is not possible.
        """
        values = Layout.stated(self.stated_layout) | changes
        text = ",".join(f"{name}={written(value)}" for name, value in values.items())
        layout, _ = self.framework.layout(text, self.model)
        return replace(self, layout=layout, stated_layout=text)

    def with_job(self, **changes: Any) -> "Case":
        """The case with some job fields changed."""
        job = replace(self.job, **changes)
        return replace(self, job=job, stated_job=self.stated_job | frozenset(changes))


def read_case(row: Row, framework: Framework | None = None) -> Case:
    """Build the case of one row, completed by its framework's defaults.

    Args:
        framework: instead of the row's.

    Raises:
        Unusable: naming the cell that is missing or the feature that is not modelled.
        PerfModelError: where catalog or specs refuse what the row states.
    """
    # The framework comes first, because its defaults complete the row's model, batch and layout.
    row = with_plain_columns(row)
    run_name = f"run {text(row, 'case_id')}"
    keys = key_tables(row)
    assumed_framework = False
    if framework is None:
        framework, assumed_framework = framework_of(framework_name(row))
    run_framework = with_framework_keys(framework, keys.get("framework", {}), run_name)

    described = model_of(row, run_framework)
    model = described.model
    seq_len, assumed_length = seq_len_of(row, model)
    row = _with_degrees_of_devices(row)
    spread = spread_of(row, seq_len, run_framework)
    cluster, network_contradictions = cluster_of(row, keys.get("network", {}), run_name)
    stated_dtype = dtype_of(row, cluster.device)
    dtype = stated_dtype.dtype

    preset = recipe_of(row, run_framework, model, cluster.device, dtype)
    job_keys = keys.get("job", {})
    job_fields = _job_fields(row, run_framework, preset, dtype, job_keys, run_name)
    job = run_framework.job(
        model,
        cluster.device,
        global_batch=spread.global_batch,
        seq_len=seq_len,
        dtype=dtype,
        **job_fields,
    )
    # A framework may run other stages of ZeRO in bf16 than in other types.
    run_framework = run_framework.for_job(job)

    layout_text = stated_layout(row, spread, model, run_framework, preset)
    layout_text += _stated_offload(row, model, cluster.device, spread.pp)
    layout_text = with_layout_keys(layout_text, keys.get("layout", {}), run_name)
    layout, _ = run_framework.layout(layout_text, model)
    if layout.devices != count(row, "n_devices", layout.devices):
        raise Unusable("degrees do not multiply to the devices")
    check_machine(cluster, job, layout.devices, "the run")

    left_open = {
        "framework": assumed_framework,
        "seq_len": assumed_length,
        "dtype": stated_dtype.is_assumed,
        **_left_open(row, cluster.device, job, spread.pp, job_keys),
    }
    assumed = (
        *described.assumed,
        *text(row, FROM_OTHERS).split(),
        *spread.assumed,
        *(name for name, is_open in left_open.items() if is_open),
        *unread_words(row),
    )
    contradictions = (
        *text(row, CONTRADICTIONS).splitlines(),
        *network_contradictions,
        *contradictions_in_words(row),
        *filter(None, [stated_dtype.contradiction]),
        *_contradictions_of_sizes(row, model, cluster),
    )
    return Case(
        case_id=text(row, "case_id"),
        model=model,
        cluster=cluster,
        job=job,
        layout=layout,
        framework=run_framework,
        assumed=assumed,
        contradictions=tuple(dict.fromkeys(contradictions)),
        stated_layout=layout_text,
        stated_job=_named_fields(row, job_fields, {**preset.job, **job_keys}),
    )


def _left_open(
    row: Row, device: Device, job: Job, pipeline_ranks: int, job_keys: Mapping[str, Any]
) -> dict[str, bool]:
    """Settings that a row may leave open, and whether it does."""
    may_pack = may_pack_conversations(row) and job.mode == "train"
    return {
        "schedule": schedule_of(row).is_one_of_several and pipeline_ranks > 1,
        COPIES_TO_HOST: _offloads_at_unknown_cost(row, device) or leaves_policy_open(row),
        CONVERSATIONS: may_pack and not job.varied_lengths,
        "adapter_rank": adapter_rank_of(row) is not None and "adapter_rank" not in job_keys,
    }


def _offloads_at_unknown_cost(row: Row, device: Device) -> bool:
    """Whether a run copies activations to the host over a link of unknown bandwidth."""
    return offloads_activations(row) and device.host_bandwidth_bytes_per_s is None


def _stated_offload(row: Row, model: Model, device: Device, pipeline_ranks: int) -> str:
    """The part of a layout's notation that says which activations a run copies to the host; empty
    if none, or if the cost of the copies is unknown."""
    if not offloads_activations(row) or _offloads_at_unknown_cost(row, device):
        return ""
    if isinstance(model, Transformer) and pipeline_ranks == 1 and recompute_of(row) != "full":
        # All layers but one: the backward of the last one begins at once.
        return f",offload_layers={model.layers - 1}"
    return ",offload=true"


def _job_fields(
    row: Row,
    framework: Framework,
    preset: RowRecipe,
    dtype: str,
    job_keys: Mapping[str, Any],
    run_name: str,
) -> dict[str, Any]:
    """The fields of the job that a row states in words, in its recipe and in `job.*` columns, the
    last before the others."""
    fields = stated_job(row, framework, preset, dtype)
    # Batch, length and element type have stood in plain columns since `with_plain_columns`.
    for name, value in job_values(job_keys, run_name).items():
        if name not in ("global_batch", "seq_len", "dtype"):
            fields[name] = value
    return fields


def _named_fields(
    row: Row, job_fields: Mapping[str, Any], stated_settings: Mapping[str, Any]
) -> frozenset[str]:
    """Names of the job's fields that the run states; CUDA graphs only where the row or its recipe
    speaks of the launch at all."""
    fields = frozenset(job_fields)
    if text(row, "launch_and_overlap") or "cuda_graphs" in stated_settings:
        return fields
    return fields - {"cuda_graphs"}


def _with_degrees_of_devices(row: Row) -> Row:
    """The row with the replicas that its devices and other degrees imply, as in launchers, if all
    are stated and contradict each other (noted in `CONTRADICTIONS`)."""
    if any(number(row, name) is None for name in ("tp", "pp", "dp", "n_devices")):
        return row
    devices = count(row, "n_devices")
    devices_per_replica = count(row, "tp") * count(row, "pp") * count(row, "cp", 1)
    return row if devices % devices_per_replica else {**row, "dp": devices // devices_per_replica}


def cluster_of(
    row: Row, network_keys: Mapping[str, Any], run_name: str
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster of a row, from the column `cluster` or from words, with changes from `network.*`
    columns; and contradictions between its columns.

    Raises:
        Unusable, PerfModelError: the words or numbers of the network cannot be read.
    """
    # A catalog's cluster has its network; `network.*` changes it. Else device, node size and the
    # words for the links make one.
    network, contradictions = network_of(row)
    nics_per_node, nic_gbit_per_s = adapters_of(row)
    if text(row, "cluster"):
        cluster = catalog.cluster(text(row, "cluster"))
        return catalog.with_network(cluster, network_keys, f"{run_name}: network.*"), contradictions
    cluster = catalog.cluster_for(
        text(row, "device"),
        count(row, "devices_per_node") if number(row, "devices_per_node") is not None else None,
        text(row, "intra_link"),
        network,
        nics_per_node,
        nic_gbit_per_s,
    )
    # Words and adapters of `network.*` stand in plain columns already (`with_plain_columns`).
    figures = dict(network_keys)
    for name in ("inter_link", "nics_per_node", "nic_gbit_per_s"):
        figures.pop(name, None)
    return catalog.with_network(cluster, figures, f"{run_name}: network.*"), contradictions


_MOST_OFF_PARAMETERS: Final = 0.15
"""Ratio of stated parameters to the model's from which they contradict each other; smaller
differences come from counting embeddings, padding and heads differently."""


def _contradictions_of_sizes(row: Row, model: Model, cluster: Cluster) -> tuple[str, ...]:
    """Sentences on how a row's stated parameters and memory contradict model and device."""
    contradictions = []
    stated = number(row, "params_b")
    if stated and isinstance(model, Transformer):
        counted = parameter_count(model) / 1e9
        if abs(stated / counted - 1) > _MOST_OFF_PARAMETERS:
            contradictions.append(
                f"params_b={stated:g} and {counted:.3g} billion parameters of its sizes"
            )
    # Sources round: up to a per cent more than the device has is not a contradiction.
    memory = number(row, "measured_peak_memory_gb")
    if memory and memory * GB > cluster.device.memory_bytes * 1.01:
        capacity = cluster.device.memory_bytes / GB
        contradictions.append(
            f"measured_peak_memory_gb={memory:g} and {capacity:.3g} GB of {cluster.device.name}"
        )
    return tuple(contradictions)


def framework_of(name: str) -> tuple[Framework, bool]:
    """The framework named in a cell (`generic` if empty or unknown, the first version for earlier
    years), and whether it is assumed."""
    try:
        return catalog.framework(name or "generic"), False
    except PerfModelError:
        name_only = name.partition("@")[0]
        if name_only in catalog.frameworks():
            return catalog.framework_versions(name_only)[0], True
        return catalog.framework("generic"), True


def read_runs(file: "Path | str | pd.DataFrame") -> tuple[list[Run], dict[str, int]]:
    """The timed runs of a table, and the number of unused rows by reason.

    Args:
        file: csv with the columns of `data/published/README.md`, or with those that `predict`
            takes: `model`, `cluster`, `layout`, `global_batch` and so on, with `step_time_s`; or
            such a frame.

    Raises:
        TableError: if the file is missing, unreadable, no table of runs, or no row can be used.
    """
    rows, skipped = rows_with_runs(file)
    return [usable.run for usable in rows], skipped


@dataclass(frozen=True)
class RowWithRun:
    """A usable row of a table of runs."""

    row: Row
    number: int
    """Place in the table, from 1."""
    in_words: bool
    """Whether the columns are the arguments of `predict`, instead of those of published runs."""
    run: Run


def rows_with_runs(file: "Path | str | pd.DataFrame") -> tuple[list[RowWithRun], dict[str, int]]:
    """The rows that `read_runs` uses, each with its run, and the number of unused rows by
    reason."""
    import pandas as pd

    if isinstance(file, pd.DataFrame):
        table, name = file, "table of runs"
    else:
        table = read_rows(Path(file))
        name = str(file)

    # Two kinds of tables: columns of published runs, and words of `predict`.
    in_words = has_words_of_predict(table)
    if in_words:
        require_words(table, name)
    else:
        table = with_columns_of_runs(table, Path(name).stem)
    if not in_words and missing_columns(table):
        raise TableError(f"{name}: {not_a_table_of_runs(table)}")
    usable_rows = []
    skipped = Counter()
    for row_number, row in enumerate(rows_of(table), 1):
        try:
            run = own_run(row, row_number) if in_words else _run(row)
            usable_rows.append(RowWithRun(row, row_number, in_words, run))
        except PerfModelError as reason:
            skipped[str(reason)] += 1
    if not usable_rows:
        reason, _ = skipped.most_common(1)[0] if skipped else ("it is empty", 0)
        raise TableError(f"{name}: no row can be used; the most frequent reason is: {reason}")
    return usable_rows, dict(skipped.most_common())


def _run(row: Row) -> Run:
    """Return a published row as a run to calibrate with."""
    measured = row["measured_iter_time_s"]
    if measured is None or row.get("status") not in (None, "ok"):
        raise Unusable("no step time was measured")
    case = read_case(row)
    check_layout(case.model, case.cluster, case.job, case.layout)
    try:
        measured_s = float(measured)
    except ValueError:
        measured_s = np.nan
    return Run(
        name=case.case_id,
        model=case.model,
        cluster=case.cluster,
        job=case.job,
        layout=case.layout,
        measured_s=measured_s,
        framework=case.framework,
    )
