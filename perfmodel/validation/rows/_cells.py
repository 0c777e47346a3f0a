"""Reads tables of published runs and the cells of their rows, including degrees and batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.errors import PerfModelError, TableError
from perfmodel.files import DAMAGED, TooLargeError, why_no_file
from perfmodel.ingest.tables import NEEDED_OF_RUNS, read_csv
from perfmodel.spec import Framework
from perfmodel.validation.rows._user_columns import STEP_COLUMNS, with_columns_of_runs

if TYPE_CHECKING:
    import pandas as pd

MOST: Final = 10**9
"""Upper limit of sizes, degrees and batches."""
Row = Mapping[str, Any]
"""Cells of one row; empty ones are None."""


FROM_OTHERS: Final = "cells_of_other_rows"
"""Column that names the cells which `with_heads` filled."""


def read_tables(files: Sequence[Path | str]) -> "tuple[pd.DataFrame, dict[str, str]]":
    """All rows of the tables of runs among some files, and why other files are not such tables.

    Raises:
        TableError: if a file is missing, unreadable or no file is a table of runs.
    """
    import pandas as pd

    tables = []
    ignored = {}
    for file in files:
        table = with_columns_of_runs(read_rows(Path(file)), Path(file).stem)

        # Files of other kinds are named, not refused: people pass whole folders.
        if missing_columns(table):
            ignored[str(file)] = not_a_table_of_runs(table)
        else:
            tables.append(table)
    if not tables:
        reason = "no file is given; give at least one"
        if files:
            reason = f"{files[0]}: {next(iter(ignored.values()))}"
        raise TableError(reason)
    return pd.concat(tables, ignore_index=True), ignored


def not_a_table_of_runs(table: "pd.DataFrame") -> str:
    """The sentence that a table lacks columns of runs, and how to write them."""
    missing = []
    for alternatives in (("model",), ("cluster", "device"), STEP_COLUMNS):
        if not any(name in table for name in alternatives):
            missing.append(" or ".join(alternatives))
    # A table of published runs may have all of these and lack further ones.
    missing = missing or missing_columns(table)
    columns = "columns" if len(missing) > 1 else "column"
    return (
        f"not a table of runs (no {columns} {', '.join(missing)}); give model, cluster, layout, global_batch and "
        "step_time_s, or the columns that 'perfmodel catalog columns' lists for runs"
    )


def missing_column(table: "pd.DataFrame") -> str | None:
    """The first missing column that a table of runs needs."""
    return next(iter(missing_columns(table)), None)


def missing_columns(table: "pd.DataFrame") -> list[str]:
    """All missing columns that a table of runs needs."""
    return [name for name in NEEDED_OF_RUNS if name not in table]


def read_rows(path: Path) -> "pd.DataFrame":
    """Read any csv file; tables of runs get missing heads from other rows (`with_heads`), and
    missing step times from their throughput (`with_step_times`).

    Raises:
        TableError: a file that is missing or no table.
    """
    import pandas as pd

    if not path.is_file():
        raise TableError(f"{path}: {why_no_file(path)}")
    try:
        return with_step_times(with_heads(read_csv(path)))
    except TableError:
        raise
    except TooLargeError as error:
        raise TableError(f"{path}: {error}") from None
    except (ValueError, pd.errors.ParserError, *DAMAGED) as error:
        raise TableError(f"{path}: not a readable table ({str(error).splitlines()[0]})") from None


class Unusable(PerfModelError):
    """Raised for a row that states too little or is not modelled."""


def with_heads(table: "pd.DataFrame") -> "pd.DataFrame":
    """Fill in missing heads if other rows of the same source and hidden size agree; the column
    `FROM_OTHERS` marks them."""
    if not {"source", "hidden", "heads"} <= set(table.columns):
        return table
    # Sources often state the heads of a model in one of their rows only.
    by_size = table.groupby(["source", "hidden"])["heads"]
    agreed = by_size.transform("first").where(by_size.transform("nunique") == 1)
    filled = np.asarray(table["heads"].isna() & agreed.notna(), bool)
    if not filled.any():
        return table
    heads = table["heads"].where(~filled, agreed)
    return table.assign(heads=heads, **{FROM_OTHERS: np.where(filled, "heads", "")})


_OF_STEP_TIME: Final = (
    "measured_iter_time_s",
    "measured_tokens_per_s_per_device",
    "n_devices",
    "seq_len",
)


def with_step_times(table: "pd.DataFrame") -> "pd.DataFrame":
    """Fill in empty step times: a step's tokens divided by the throughput of all devices."""
    import pandas as pd

    if not set(_OF_STEP_TIME) <= set(table.columns):
        return table

    def column(name: str) -> np.ndarray:
        if name in table:
            values = pd.to_numeric(table[name], errors="coerce")
        else:
            values = np.full(len(table), np.nan)
        return np.asarray(values, float)

    # A batch that is not stated is that of the micro-batches of all replicas.
    batch = column("global_batch")
    batch_of_replicas = column("micro_batch") * column("num_microbatches") * column("dp")
    batch = np.where(np.isnan(batch), batch_of_replicas, batch)
    tokens_per_s = column("measured_tokens_per_s_per_device") * column("n_devices")
    with np.errstate(divide="ignore", invalid="ignore"):
        step_s = batch * column("seq_len") / tokens_per_s
    measured = table["measured_iter_time_s"]
    is_filled = np.asarray(measured.isna(), bool) & np.isfinite(step_s) & (step_s > 0)
    if not is_filled.any():
        return table
    return table.assign(measured_iter_time_s=measured.astype(object).where(~is_filled, step_s))


def text(row: Row, name: str, default: str = "") -> str:
    """A cell as text; `default` if empty."""
    value = row.get(name)
    return default if value is None else str(value).strip()


def number(row: Row, name: str) -> float | None:
    """A cell as a number; None if empty.

    Raises:
        Unusable: it is something else.
    """
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        value_read = float(value)
    except (TypeError, ValueError):
        raise Unusable(f"{name} is not a number") from None
    if not isfinite(value_read):
        raise Unusable(f"{name} is not a number")
    return value_read


def count(row: Row, name: str, default: int | None = None, least: int = 1) -> int:
    """A cell as a whole number of at least `least`.

    Raises:
        Unusable: it is none, or is empty and there is no default.
    """
    value = number(row, name)
    if value is None:
        if default is None:
            raise Unusable(f"{name} is not stated")
        return default
    if not least <= value <= MOST or value != int(value):
        raise Unusable(f"{name} must be a whole number from {least} to {MOST:,}, got {value:g}")
    return int(value)


_DEGREES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class Spread:
    """The degrees and the distribution of the batch."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    global_batch: int
    """Whole micro-batches per replica; a smaller last micro-batch is rounded up, as it runs as
    one."""
    assumed: tuple[str, ...]
    """Names of settings that nothing in the row states."""


def spread_of(row: Row, seq_len: int, framework: Framework) -> Spread:
    """The degrees and batch distribution of a row.

    One missing degree follows from the devices. A missing micro-batch follows from the
    micro-batches per replica; without these it is the framework's default. A missing global batch
    follows from the micro-batches, or from tokens per second and step time.

    Raises:
        Unusable: naming the cells that are missing.
    """
    degrees = _degrees(row)
    tp, pp, dp = (degrees[name] for name in _DEGREES)

    # Any two of batch, micro-batch and micro-batches per replica determine the third.
    per_replica = number(row, "num_microbatches")
    global_batch = count(row, "global_batch", 0) or _batch_of_throughput(row, seq_len)
    micro_batch = count(row, "micro_batch", 0)
    assumed: tuple[str, ...] = ()
    if not micro_batch and global_batch and per_replica and global_batch % (dp * per_replica) == 0:
        # A micro-batch that follows from batch and number of micro-batches is stated as good as
        # any.
        micro_batch = int(global_batch / (dp * per_replica))
    elif not micro_batch:
        chunks = count(row, "vpp", 1) if pp > 1 else 1
        micro_batch = framework.usual_micro_batch(pp * chunks, int(global_batch) // dp)
        assumed = ("micro_batch",)
    if not global_batch:
        if per_replica is None:
            raise Unusable("global_batch is not stated")
        global_batch = dp * micro_batch * count(row, "num_microbatches")

    # A smaller last micro-batch takes as long as a whole one.
    per_step = dp * micro_batch
    whole_batch = -(-global_batch // per_step) * per_step
    return Spread(tp, pp, dp, count(row, "cp", 1), micro_batch, whole_batch, assumed)


def _degrees(row: Row) -> dict[str, int]:
    """The degrees of parallelism; one that is not stated follows from the devices and the others.

    Raises:
        Unusable: several are not stated, or one that does not follow.
    """
    missing = [name for name in _DEGREES if number(row, name) is None]
    if len(missing) > 1:
        raise Unusable(f"{', '.join(missing[:-1])} and {missing[-1]} are not stated")
    degrees = {name: count(row, name) for name in _DEGREES if name not in missing}
    if missing:
        devices = count(row, "n_devices", 0)
        per_missing = count(row, "cp", 1) * prod(degrees.values())
        if not devices or devices % per_missing:
            raise Unusable(f"{missing[0]} is not stated")
        degrees[missing[0]] = devices // per_missing
    return degrees


def _batch_of_throughput(row: Row, seq_len: int) -> int:
    """Sequences per step, from throughput, step time and devices; 0 unless all are stated."""
    rate = number(row, "measured_tokens_per_s_per_device")
    step_s = number(row, "measured_iter_time_s")
    if not rate or not step_s or number(row, "n_devices") is None:
        return 0
    return round(rate * step_s * count(row, "n_devices") / seq_len)
