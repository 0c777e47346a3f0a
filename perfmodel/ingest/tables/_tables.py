"""Tables of measured kernels, collectives and published runs: one declared schema, checked on
reading."""

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from perfmodel import files
from perfmodel.errors import TableError, first_line
from perfmodel.files import why_no_file
from perfmodel.ingest.tables._atomic import write_atomic
from perfmodel.ops import FAMILIES

if TYPE_CHECKING:
    import pandas as pd

TableKind = Literal["compute", "collective"]


@dataclass(frozen=True)
class Column:
    """A column of a table: text, or numbers not below `low`."""

    text: bool = False
    low: float = -np.inf
    unit: str = ""
    meaning: str = ""
    kind: TableKind | None = None
    """The kind of tables that have it; None: both kinds."""


def _word(meaning: str, kind: TableKind | None = None) -> Column:
    return Column(text=True, meaning=meaning, kind=kind)


def _at_least(low: float, unit: str, meaning: str, kind: TableKind | None = None) -> Column:
    return Column(low=low, unit=unit, meaning=meaning, kind=kind)


def _shapes() -> dict[str, Column]:
    """Columns of the shapes of all op families."""
    # Families share columns (rows, hidden): each stands once, and its meaning names all of them.
    families: dict[str, list[str]] = {}
    stated = {}
    for family in FAMILIES.values():
        for name, column in family.columns.items():
            families.setdefault(column.column or name, []).append(family.name)
            stated[column.column or name] = column
    columns = {}
    for name, column in stated.items():
        meaning = f"shape of op_family {', '.join(families[name])}"
        if column.default is not None:
            meaning += f"; {column.default:g} if empty"
        columns[name] = Column(
            text=column.from_text is not None, low=column.low, kind="compute", meaning=meaning
        )
    return columns


COLUMNS: Final[dict[str, Column]] = {
    # The subject, the tools and the method of a measurement.
    "source": _word("where the row is from"),
    "device": _word("catalog name or alias of the device"),
    "op_family": _word(f"family of the kernel: {', '.join(FAMILIES)}", "compute"),
    "op": _word("kernel within its family, such as linear or rms_norm", "compute"),
    "dtype": _word("element type, such as bf16"),
    "pass": _word("fwd, bwd, dgrad or wgrad; fwd if empty", "compute"),
    "software": _word("library and version"),
    "variant": _word("implementation, if there are several", "compute"),
    "layout": _word("order of the operands of a product", "compute"),
    "out_dtype": _word("element type of the result, if different", "compute"),
    "phase": _word("state of the machine in which the kernel was timed", "compute"),
    "interconnect": _word("links, as 'NVLink3 + InfiniBand HDR'", "collective"),
    "collective": _word(
        "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or p2p", "collective"
    ),
    "algorithm": _word("algorithm that the run is forced to use", "collective"),
    "mode": _word("how the collective is called", "collective"),
    # The measurement itself, in the unit that profilers print.
    "time_us": _at_least(0, "us", "time of one call"),
    "time_us_std": _at_least(0, "us", "its standard deviation"),
    "n_repeats": _at_least(0, "", "calls that were timed"),
    **_shapes(),
    # Ranks and size of a collective.
    "num_ranks": _at_least(1, "", "ranks that take part", "collective"),
    "num_nodes": _at_least(1, "", "nodes that they are on", "collective"),
    "ranks_per_node": _at_least(0, "", "ranks within a node", "collective"),
    "bytes": _at_least(0, "bytes", "size of the buffer", "collective"),
}
"""Columns with a meaning; other columns are kept unchanged."""

REQUIRED: Final[dict[TableKind, tuple[str, ...]]] = {
    "compute": ("device", "op_family", "dtype", "time_us"),
    "collective": ("device", "collective", "num_ranks", "time_us"),
}
_TAIL_BYTES: Final = 1 << 16
_CELL_BYTES: Final = 8
_BATCH_ROWS: Final = 4096
_UNITLESS: Final = {"time": "time_us", "latency": "time_us", "duration": "time_us", "size": "bytes"}


NEEDED_OF_RUNS: Final = (
    "case_id",
    "source",
    "device",
    "tp",
    "pp",
    "dp",
    "micro_batch",
    "measured_iter_time_s",
)
"""Columns that every table of runs must have."""


def _job_file_columns() -> dict[str, tuple[str, str]]:
    """Columns of the tables of a job file, by the prefix of their names."""
    # Any key of a job file may be a column, for settings that no other column states.
    examples = {
        "layout": "layout.offload",
        "job": "job.optimizer",
        "network": "network.latency_us",
        "framework": "framework.execution",
        "model": "model.gated_ffn",
    }
    columns = {}
    for table, example in examples.items():
        meaning = f"any key of [{table}] in a job file, such as {example}; overrides descriptions in words"
        columns[f"{table}.*"] = ("as in a job file", meaning)
    return columns


RUN_COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    # Source, software and machine of a run.
    "case_id": ("text", "name of the run"),
    "source": ("text", "who published it; runs of one source are judged together"),
    "status": ("text", "ok, or why there is no time (oom, crash); ok if empty"),
    "device": ("text", "catalog name or alias of the device"),
    "cluster": ("text", "catalog name or TOML of a cluster; fills device, node and links"),
    "n_devices": ("number", "devices that the run used"),
    "devices_per_node": ("number", "devices per node; 8 if empty"),
    "intra_link": ("text", "links within a node, such as NVLink"),
    "inter_link": ("text", "network between nodes, such as 8x 400G InfiniBand"),
    "inter_link_as_stated": ("text", "network between nodes as its source describes it"),
    "nics_per_node": ("number", "network adapters of a node"),
    "nic_gbit_per_s": ("Gbit/s", "rate of one adapter"),
    # The model: by name, or by its sizes.
    "framework": ("text", "training framework, NAME or NAME@YEAR"),
    "framework_as_stated": (
        "text",
        "training framework as its source describes it, such as torchtitan compile",
    ),
    "model": ("text", "catalog name; if empty, the next columns describe the model"),
    "family": ("text", "kind of model, such as llama"),
    "params_b": ("10^9", "parameters of the model"),
    "layers": ("number", "layers of the model"),
    "hidden": ("number", "hidden size"),
    "heads": ("number", "attention heads"),
    "kv_heads": ("number", "heads of keys and values; all if empty"),
    "head_dim": ("number", "size of a head; hidden / heads if empty"),
    "ffn_hidden": ("number", "inner size of the feed-forward"),
    "vocab": ("number", "vocabulary, as it ran"),
    "tokenizer_vocab": (
        "number",
        "used if vocab is empty: entries of the tokenizer, which the framework pads",
    ),
    "n_experts": ("number", "experts; none if empty"),
    "top_k": ("number", "experts per token"),
    "first_dense_layers": ("number", "leading layers without experts"),
    # The job.
    "seq_len": ("tokens", "sequence length; the model's if empty"),
    "global_batch": ("sequences", "sequences per step"),
    "micro_batch": ("sequences", "sequences per micro-batch and replica"),
    "num_microbatches": ("number", "micro-batches per step and replica"),
    "dtype": ("text", "element type; bf16 if empty"),
    "dtype_recipe": ("text", "scaling recipe of 8- and 4-bit products"),
    "flash_attention": ("0 or 1", "fused attention"),
    # The layout.
    "tp": ("number", "degree as in a layout: tensor"),
    "pp": ("number", "degree as in a layout: pipeline"),
    "dp": ("number", "degree as in a layout: data"),
    "cp": ("number", "degree as in a layout: context"),
    "ep": ("number", "degree as in a layout: expert"),
    "etp": ("number", "degree as in a layout: tensor, in experts"),
    "vpp": ("number", "model chunks per pipeline rank"),
    "schedule": ("text", "pipeline schedule"),
    "zero_stage": ("0 to 3", "ZeRO stage"),
    "sharding": ("text", "ZeRO stage in words, such as fsdp"),
    "sequence_parallel": ("0 or 1", "norms sharded along the sequence"),
    "recompute": ("text", "none, selective or full"),
    "recompute_detail": ("text", "layers or ops that are recomputed"),
    "launch_and_overlap": ("text", "launch settings, as name=value; name=value"),
    # Origin of the row.
    "notes": ("text", "for people; nothing is read from it"),
    "url_or_repo": (
        "text",
        "where the row was found; for MLPerf it also names the submitter, if that column is empty",
    ),
    "submitter": (
        "text",
        "who ran it, if a source has runs of several teams; runs of one team are judged together",
    ),
    "year": ("number", "year of the run; if empty, that of the framework"),
    "recipe_release": (
        "text",
        "release of the framework's recipe that ran, such as v25.04; default if it has none",
    ),
    **_job_file_columns(),
    "layout": ("text", "the layout in one column, as predict takes it (fit --runs)"),
    "name": ("text", "name of the run, if the table has no case_id"),
    # Results: one of the first three is needed.
    "measured_iter_time_s": ("s", "time of a step"),
    "measured_tokens_per_s_per_device": ("tokens/s", "throughput, if no time is stated"),
    "measured_tflops_per_device": (
        "TFLOP/s",
        "FLOP/s as the authors count them; together with the throughput this reveals multi-token-prediction modules",
    ),
    "measured_mfu": ("share", "model FLOP/s as a share of the peak"),
    "measured_hfu": ("share", "the same, with recomputation counted"),
    "measured_peak_memory_gb": ("GB", "peak memory of a device"),
    "memory_unit": ("text", "GiB, if the peak is stated in GiB"),
    "memory_kind": (
        "text",
        "how the peak was measured: allocated, reserved or the driver's figure",
    ),
}
"""Columns that a table of runs may have: unit or kind of their values, and meaning."""


def read_table(path: Path | str) -> "pd.DataFrame":
    """Read and check a table of kernel or collective timings (csv, csv.gz or parquet).

    Rows keep their file order with a fresh 0-based index. Text columns hold `""` where empty.

    Raises:
        TableError: if the file is missing, truncated or not a table; a required column is missing
            (or stands there without its unit); a number is missing where it must not be, is not a
            number, negative or infinite. The message names file, column and row.
    """
    import pandas as pd

    path = Path(path)
    table = _load(path)
    kind = table_kind(table, path)
    for name in REQUIRED[kind]:
        if name not in table:
            raise TableError(_missing(path, name, table))
    for name in table.columns.intersection(list(COLUMNS)):
        # Known columns are checked in full before anything is fitted: a wrong
        # unit or sign would show as a strange model.
        table[name] = _checked(path, name, pd.Series(table[name]), COLUMNS[name])
    bad = np.asarray(table["time_us"] <= 0, bool)
    if bad.any():
        row = int(np.argmax(bad))
        raise TableError(
            f"{path}: time_us must be above zero microseconds, row {row} has {table['time_us'].iloc[row]}; "
            "drop the row or measure it again"
        )
    if {"num_ranks", "num_nodes"} <= set(table):
        spread = np.asarray(table["num_nodes"] > table["num_ranks"], bool)
        if spread.any():
            row = int(np.argmax(spread))
            nodes, ranks = table["num_nodes"].iloc[row], table["num_ranks"].iloc[row]
            raise TableError(
                f"{path}: row {row} has {nodes:g} nodes for {ranks:g} ranks; a node has at least one rank"
            )
    return table.reset_index(drop=True)


def table_kind(table: "pd.DataFrame", path: Path | str = "table") -> TableKind:
    """`collective` if the table has a collective column, else `compute`."""
    if "collective" in table:
        return "collective"
    if "op_family" in table:
        return "compute"
    raise TableError(
        f"{path}: neither an op_family column (kernels) nor a collective column; it has "
        f"{', '.join(map(str, table.columns[:8]))}; 'perfmodel catalog columns' lists the columns of each table"
    )


TABLE_SUFFIXES: Final = (".csv", ".csv.gz", ".parquet")


def require_table_file(path: Path | str) -> None:
    """Raise `TableError` for a name whose ending is that of no table."""
    if not str(path).endswith(TABLE_SUFFIXES):
        raise TableError(
            f"{path}: the file name of a table must end in {', '.join(TABLE_SUFFIXES)}; use one of these"
        )


def write_table(path: Path | str, table: "pd.DataFrame") -> None:
    """Write a table atomically; the suffix (`TABLE_SUFFIXES`) chooses the format.

    Raises:
        TableError: another suffix.
    """
    require_table_file(path)
    name = str(path)
    if name.endswith(".parquet"):
        write_atomic(path, lambda f: table.to_parquet(f, index=False))
    else:
        compression = "gzip" if name.endswith(".gz") else None
        write_atomic(path, lambda f: table.to_csv(f, index=False, compression=compression))


def _load(path: Path) -> "pd.DataFrame":
    """Read a CSV or parquet file whose content is within the limit on memory."""
    import pandas as pd

    if not path.is_file():
        raise TableError(f"{path}: {why_no_file(path)}")
    try:
        # Sizes are checked before anything is read: compressed tables expand to many times their
        # size.
        if path.suffix == ".parquet":
            _require_parquet_within(path)
            return pd.read_parquet(path)
        table = read_csv(path)
        _require_unique_columns(path)
        return table
    except TableError:
        raise
    except files.TooLargeError as error:
        raise TableError(f"{path}: {error}") from None
    except (ValueError, *files.DAMAGED, pd.errors.ParserError) as error:
        raise TableError(
            f"{path}: not a readable table ({first_line(error)}); is the file complete?"
        ) from None


def read_csv(path: Path, **options: Any) -> "pd.DataFrame":
    """A csv table, expanded first if it is compressed; `options` are those of `pandas.read_csv`.

    Raises:
        TableError: the file ends within a row.
        files.TooLargeError: it is too large once it is expanded.
        ValueError, OSError, EOFError, zlib.error, lzma.LZMAError: not a table, or damaged
        compressed data.
    """
    import pandas as pd

    if files.is_compressed(path):
        # Pandas would expand the file without a limit.
        return pd.read_csv(io.BytesIO(files.read_data(path)), low_memory=False, **options)
    limit_bytes = files.data_limit_bytes()
    if path.stat().st_size > limit_bytes:
        raise files.too_large(limit_bytes)
    # A download that broke off leaves a csv that pandas reads without a word.
    if path.suffix == ".csv":
        _require_whole_rows(path)
    return pd.read_csv(path, compression=None, low_memory=False, **options)


def _require_parquet_within(path: Path) -> None:
    """Raise `TooLargeError` for a table that takes more memory than `data_limit_bytes`.

    Runs and dictionaries of parquet stand for any number of cells, so that sizes in the file say
    little: the table is decoded piece by piece and each piece forgotten.
    """
    import pyarrow.parquet

    limit = files.data_limit_bytes()
    with pyarrow.parquet.ParquetFile(path) as file:
        # The metadata may lie, but a table that is too large by its own account need not be read.
        cells = file.metadata.num_rows * file.metadata.num_columns
        if cells * _CELL_BYTES > limit:
            raise files.too_large(limit)
        size = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            size += batch.nbytes
            if size > limit:
                raise files.too_large(limit)


def _require_whole_rows(path: Path) -> None:
    """Raise `TableError` if a csv file ends within a row: the last one has no line end, and cells
    are missing."""
    with path.open("rb") as file:
        columns = len(next(csv.reader([file.readline().decode()]), []))
        # Only the end is read: a table may have gigabytes.
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        last = file.read().rpartition(b"\n")[2].decode(errors="replace")
    if 0 < len(next(csv.reader([last]), [])) < columns:
        raise TableError(f"{path}: ends within a row ({last[:40]!r}); is the file complete?")


def _require_unique_columns(path: Path) -> None:
    """Raise `TableError` if a csv file names a column twice: pandas would rename the second one,
    which then counts for nothing."""
    if files.is_compressed(path):
        return
    with path.open("rb") as file:
        first_line = file.readline().decode("utf-8-sig", errors="replace")
    names = [name.strip() for name in next(csv.reader([first_line]), []) if name.strip()]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise TableError(f"{path}: two columns are named {twice[0]!r}; remove or rename one")


def _missing(path: Path, name: str, table: "pd.DataFrame") -> str:
    # A column without a unit is never guessed: milliseconds read as microseconds would fit, and be
    # wrong by a thousand.
    for unitless, meant in _UNITLESS.items():
        if meant == name and unitless in table:
            return f"{path}: column {unitless!r} has no unit; rename it to {meant!r} (values in microseconds)"
    if name == "time_us":
        times = [c for c in table.columns if str(c).startswith("time_")]
        if times:
            return f"{path}: found {times[0]!r} but times are read from 'time_us'; convert the column to microseconds"
    return f"{path}: column {name!r} is missing; found {', '.join(map(str, table.columns))}"


def _checked(
    path: Path, name: str, values: "pd.Series", column: Column
) -> "pd.Series | np.ndarray":
    """Check a column's cells, and return them as texts or as numbers."""
    import pandas as pd

    empty = np.asarray(values.isna(), bool)
    if column.text:
        return np.where(empty, "", values.astype(object).astype(str).to_numpy(object))
    numbers = np.asarray(pd.to_numeric(values, errors="coerce"), float)
    # Most cells may be empty (a row has the sizes of its own family alone), but a row without a
    # time is not a measurement.
    wrong = np.isnan(numbers) & (~empty | (name == "time_us"))
    wrong |= np.isinf(numbers) | (numbers < column.low)
    if wrong.any():
        row = int(np.argmax(wrong))
        unit = f" {column.unit}" if column.unit else ""
        limit = f" of at least {column.low:g}{unit}" if np.isfinite(column.low) else ""
        raise TableError(
            f"{path}: {name} must be a finite number{limit}, row {row} has {values.iloc[row]}"
        )
    return numbers
