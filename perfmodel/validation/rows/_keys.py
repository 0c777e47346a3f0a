"""Reads columns that are keys of a job file: `layout.offload`, `job.optimizer`, ...

They are checked like the keys of a job file, and override columns in words. A key with a plain
column of the same meaning (`layout.tp` and `tp`) fills that column, so that readers of plain
columns find it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.errors import PerfModelError
from perfmodel.spec import Framework, Job, Layout, key_fields
from perfmodel.spec.notation import written
from perfmodel.validation.rows._cells import Row, Unusable, number, text
from perfmodel.validation.rows._layout_words import columns_of_schedule

if TYPE_CHECKING:
    import pandas as pd

KEY_TABLES: Final = ("layout", "job", "framework", "network", "model")
"""Prefixes of keys, before the dot."""
CONTRADICTIONS: Final = "contradictions_between_columns"
"""Cell with the contradictions between a row's columns, one sentence per line."""
_PLAIN_COLUMNS: Final[Mapping[str, str]] = {
    "layout.tp": "tp",
    "layout.pp": "pp",
    "layout.dp": "dp",
    "layout.cp": "cp",
    "layout.ep": "ep",
    "layout.etp": "etp",
    "layout.vpp": "vpp",
    "layout.micro_batch": "micro_batch",
    "layout.zero": "zero_stage",
    "layout.sequence_parallel": "sequence_parallel",
    "layout.recompute": "recompute",
    "layout.schedule": "schedule",
    "job.global_batch": "global_batch",
    "job.seq_len": "seq_len",
    "job.dtype": "dtype",
    "job.flash_attention": "flash_attention",
    "model.name": "model",
    "model.layers": "layers",
    "model.hidden": "hidden",
    "model.heads": "heads",
    "model.kv_heads": "kv_heads",
    "model.head_dim": "head_dim",
    "model.ffn_hidden": "ffn_hidden",
    "model.vocab": "vocab",
    "model.experts.count": "n_experts",
    "model.experts.topk": "top_k",
    "model.experts.first_dense_layers": "first_dense_layers",
    "network.inter_link": "inter_link",
    "network.nics_per_node": "nics_per_node",
    "network.nic_gbit_per_s": "nic_gbit_per_s",
    "framework.name": "framework",
}
"""Plain columns that are equivalent to a key."""
_WHOLE_MODEL: Final = frozenset({"layers", "hidden", "heads"})
"""Keys with which `model.*` columns define a whole model, as the table [model] of a job file
does."""


def rows_of(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """Iterate over the rows of a table of runs, with plain columns filled in from keys."""
    records: list[Any] = table.astype(object).where(table.notna(), None).to_dict("records")
    return [dict(with_plain_columns(record)) for record in records]


def cell_value(cell: Any) -> Any:
    """Convert a cell to a TOML value: whole numbers, text that is TOML, else plain text."""
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, int | float):
        return int(cell) if float(cell).is_integer() else float(cell)
    cell_text = str(cell).strip()
    if cell_text in ("True", "False"):
        return cell_text == "True"
    return job_files.toml_value(cell_text)


def key_tables(row: Row) -> dict[str, dict[str, Any]]:
    """The keys stated by a row's columns, as tables of a job file.

    Raises:
        Unusable: a column with a dot whose table or key there is not; a key that is a table and a
            value at once.
    """
    tables: dict[str, dict[str, Any]] = {}
    for column, cell in row.items():
        table, dot, key = str(column).partition(".")
        is_empty = cell is None or (isinstance(cell, str) and not cell.strip())
        if not dot or table not in KEY_TABLES or is_empty:
            continue
        # `model.experts.count` is the key `count` of the table `experts` in the table `model`.
        *inner, name = key.split(".")
        place = tables.setdefault(table, {})
        for part in inner:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise Unusable(f"{column}: {part} is already a value, not a table")
        place[name] = _typed(table, name, cell_value(cell))
    return tables


def _typed(table: str, name: str, value: Any) -> Any:
    """Convert 0 and 1 to false and true if the key is a switch."""
    # Tables write switches as 0 and 1, which the records' checks would take for numbers.
    kinds = {"layout": Layout, "job": Job, "framework": Framework}
    key_field = key_fields(kinds[table]).get(name) if table in kinds else None
    is_switch = key_field is not None and key_field.hint is bool
    return bool(value) if is_switch and value in (0, 1) else value


def with_plain_columns(row: Row) -> Row:
    """Fill in plain columns from equivalent keys, which override; note differences.

    A `cluster` fills `device` and `devices_per_node`.
    """
    filled: dict[str, Any] = dict(row)
    contradictions = text(row, CONTRADICTIONS).splitlines()
    # A key wins over a plain column, because it is exact.
    for column, plain_column in _PLAIN_COLUMNS.items():
        cell = row.get(column)
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            continue
        value = cell_value(cell)
        value = int(value) if isinstance(value, bool) else value
        plain_cell = row.get(plain_column)

        # Where key and plain column differ, the key is taken and the contradiction kept: it
        # widens the interval.
        is_stated = plain_cell is not None and str(plain_cell).strip() != ""
        if is_stated and not _equal_text(value, cell_value(plain_cell)):
            contradictions.append(f"{column}={value} and {plain_column}={plain_cell}")
        filled[plain_column] = value
    if text(row, "cluster"):
        contradictions += _fill_from_cluster(filled)
    contradictions += _fill_from_schedule(filled)
    contradictions += _contradictions_of_counts(filled)
    if contradictions:
        filled[CONTRADICTIONS] = "\n".join(dict.fromkeys(contradictions))
    return filled


def _equal_text(a: Any, b: Any) -> bool:
    return str(a).lower() == str(b).lower() or a == b


def _fill_from_cluster(row: dict[str, Any]) -> list[str]:
    """Fill in device and node size from a row's cluster; note where the row differs."""
    try:
        cluster = catalog.cluster(text(row, "cluster"))
    except PerfModelError:
        # `read_case` says why.
        return []
    contradictions = []
    stated = text(row, "device")
    if stated:
        try:
            # Devices of one die differ in form or power, and sources seldom tell these apart.
            device = catalog.device(stated)
            is_same = device == cluster.device or device.die == cluster.device.die != ""
        except PerfModelError:
            is_same = stated == cluster.device.name
        if not is_same:
            contradictions.append(
                f"device={stated} and cluster={text(row, 'cluster')} of {cluster.device.name}"
            )
    row["device"] = cluster.device.name
    row["devices_per_node"] = cluster.devices_per_node
    return contradictions


def _fill_from_schedule(row: dict[str, Any]) -> list[str]:
    """Fill in numbers that the words of a row's schedule state; note where the row differs."""
    contradictions = []
    for column, value in columns_of_schedule(row).items():
        try:
            stated = number(row, column)
        except Unusable:
            # `read_case` says why.
            continue
        if stated is None:
            row[column] = value
        elif stated != value:
            contradictions.append(f"{column}={stated:g} and schedule={text(row, 'schedule')}")
    return contradictions


def _contradictions_of_counts(row: Row) -> list[str]:
    """Sentences on contradictions between degrees and devices, and between sequences and
    micro-batches. Cells that are not numbers are reported elsewhere."""
    try:
        # Degrees and batch can be multiplied out only if all cells are numbers.
        tp, pp, dp, devices = (number(row, name) for name in ("tp", "pp", "dp", "n_devices"))
        batch = number(row, "global_batch")
        micro = number(row, "micro_batch")
        count = number(row, "num_microbatches")
        cp = number(row, "cp") or 1
    except Unusable:
        return []
    contradictions = []
    if tp and pp and dp and devices and tp * pp * dp * cp != devices:
        contradictions.append(f"tp*pp*dp*cp={tp * pp * dp * cp:g} and n_devices={devices:g}")
    # The last micro-batch may be smaller.
    if batch and micro and count and dp and abs(micro * count * dp - batch) >= micro * dp:
        contradictions.append(
            f"micro_batch*num_microbatches*dp={micro * count * dp:g} and global_batch={batch:g}"
        )
    return contradictions


def states_whole_model(model_keys: Mapping[str, Any]) -> bool:
    """Whether the `model.*` columns define a whole model."""
    return model_keys.keys() >= _WHOLE_MODEL


def layout_values(keys: Mapping[str, Any], run_name: str) -> dict[str, Any]:
    """The layout fields stated by keys, checked.

    Raises:
        LayoutError, UnknownNameError: a key that no layout has, or a value that it cannot have.
    """
    if not keys:
        return {}
    stated = []
    for key, value in keys.items():
        plain_value = tuple(value) if isinstance(value, list) else value
        stated.append(f"{key}={written(plain_value)}")
    notation = ",".join(stated)
    try:
        return Layout.stated(notation)
    except PerfModelError as error:
        # Errors of other types name the key themselves.
        if type(error) is not PerfModelError:
            raise
        raise PerfModelError(f"{run_name}: layout.*: {error}") from None


def job_values(keys: Mapping[str, Any], run_name: str) -> dict[str, Any]:
    """The job fields stated by keys, checked as in a job file.

    Raises:
        PerfModelError: a key that no job has, or a value that it cannot have.
    """
    return catalog.checked_fields(Job, keys, f"{run_name}: job.*", job_files.JOB_WORDS)


def with_framework_keys(framework: Framework, keys: Mapping[str, Any], run_name: str) -> Framework:
    """A framework with the facts stated by keys.

    Raises:
        PerfModelError: a key that no framework has, or a value that it cannot have.
    """
    return job_files.framework_with(
        {name: value for name, value in keys.items() if name != "name"}, framework, run_name
    )
