"""Prepares measurement tables for training: clean, merge, split."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.cost.learn.rows import Rows, kinds_of, physics_of, rows_from_table
from perfmodel.cost.learn.stack import Stack, figures_named
from perfmodel.errors import TableError
from perfmodel.ingest import clean_kernels
from perfmodel.ingest.tables import hashed, number, relabel, text
from perfmodel.ops import KindColumns, Physics
from perfmodel.ops.physics import Machine

if TYPE_CHECKING:
    import pandas as pd

_STACK: Final = ("device", "source", "software")
"""Columns that tell stacks apart."""
_OF_STACK: Final = ("host_launch", "order")
"""Columns that are alike for all rows of a stack."""
_NOT_SHAPE: Final = ("element_bytes", "trans_a", "trans_b", "accumulate")
"""Columns of a kernel that do not make it another shape: splits keep whole shapes together."""


@dataclass(frozen=True)
class Samples:
    """Measured rows of one family, repeats of a shape merged to their median."""

    rows: Rows
    stack: Int64[np.ndarray, "n"]
    """Index into `stacks`."""
    time_s: Float64[np.ndarray, "n"]
    stacks: tuple[Stack, ...]
    shape_key: np.ndarray
    """Hash of each row's shape, uint64 [n]: equal shapes have equal keys on all devices and in all
    passes."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, index: np.ndarray) -> "Samples":
        """The samples at `index`, with the same stacks."""
        return Samples(
            self.rows.take(index),
            self.stack[index],
            self.time_s[index],
            self.stacks,
            self.shape_key[index],
        )

    @property
    def dtypes(self) -> np.ndarray:
        """Dtype class of every row (object dtype)."""
        return self.rows.dtypes

    def physics(self) -> tuple[Physics, Machine]:
        """The work of every sample, and the figures of its device."""
        return physics_of([s.figures for s in self.stacks], self.stack, self.rows)


def gather(tables: "Iterable[pd.DataFrame]", family: str, dtypes: tuple[str, ...]) -> Samples:
    """Merge tables into the samples of one family (of some dtype classes, if any are named).

    Raises:
        TableError: if no usable row remains, or for a device that the catalog does not have.
    """
    import pandas as pd

    parts = [_part(table, family, dtypes) for table in tables]
    usable = [part for part in parts if part is not None]
    if not usable:
        raise TableError(f"the given tables have no usable {family} row")
    return _merge(family, pd.concat(usable, ignore_index=True))


def _part(table: "pd.DataFrame", family: str, dtypes: tuple[str, ...]) -> "pd.DataFrame | None":
    """Usable rows of one table: shape columns, kind, and what identifies the stack."""
    import pandas as pd

    table = clean_kernels(table)
    family_rows: Any = table[(text(table, "op_family") == family) & may_be_fitted(table)]
    if not len(family_rows):
        return None
    # Rows that lack a size, or are of a type that is not asked for, are left out last, so that
    # columns stay aligned.
    rows, complete = rows_from_table(family_rows, family)
    if dtypes:
        complete &= np.isin(rows.dtypes, dtypes)
    frame = pd.DataFrame(rows.shape)
    for name, column in rows.columns._asdict().items():
        frame[name] = column
    frame["device"] = relabel(text(family_rows, "device"), lambda name: figures_named(name).name)
    for name in (*_STACK[1:], *_OF_STACK):
        frame[name] = family_rows[name].to_numpy()
    frame["time_s"] = number(family_rows, "time_us") * 1e-6
    usable: Any = frame[complete]
    return usable if len(usable) else None


def may_be_fitted(table: "pd.DataFrame") -> np.ndarray:
    """Rows of a clean table that may be used for fitting."""
    is_clean = (table["flaw"] == "").to_numpy() & ~table["contradicted"].to_numpy()
    return is_clean & (number(table, "time_us") > 0)


def _merge(family: str, frame: "pd.DataFrame") -> Samples:
    """Samples of a frame with a row per measurement."""
    # Repeats of a kernel on a stack count once, by their median. What is not a column of the stack
    # or of the kind is one of the shape.
    other_columns = (*_STACK, *_OF_STACK, *KindColumns._fields, "time_s")
    names = [column for column in frame.columns if column not in other_columns]
    same_kernel = [*_STACK, *KindColumns._fields, *names]
    merged: Any = frame.groupby(same_kernel, sort=True, as_index=False)["time_s"].median()

    # Stacks and their numbers in the merged rows are both sorted by the same columns, so that a
    # row's number is the place of its stack.
    facts = frame.groupby(list(_STACK), sort=True)[list(_OF_STACK)].first()
    stack_of_row = merged.groupby(list(_STACK), sort=True).ngroup().to_numpy(np.int64)
    kinds, kind_of_row = kinds_of(
        KindColumns(*(text(merged, name) for name in KindColumns._fields))
    )
    stacks = []
    names_and_facts = zip(facts.index, facts.to_numpy(object), strict=True)
    for number_of_stack, (stack_names, stack_facts) in enumerate(names_and_facts):
        device, source, software = stack_names
        host_launch, order = stack_facts
        counts = np.bincount(kind_of_row[stack_of_row == number_of_stack], minlength=len(kinds))
        rows_by_kind = {
            kind: int(count) for kind, count in sorted(zip(kinds, counts, strict=True)) if count
        }
        stacks.append(
            Stack(
                figures_named(device), source, software, rows_by_kind, bool(host_launch), int(order)
            )
        )
    rows = Rows(family, {name: number(merged, name) for name in names}, kinds, kind_of_row)
    shape_key = hashed([merged[name].to_numpy() for name in names if name not in _NOT_SHAPE])
    return Samples(rows, stack_of_row, number(merged, "time_s"), tuple(stacks), shape_key)


def held_out(samples: Samples, share: float) -> np.ndarray:
    """Bool mask of samples whose whole shape (on every device and software) is kept out."""
    return samples.shape_key % np.uint64(10_000) < share * 10_000


def split(samples: Samples, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split into indices for fitting, early stopping and reporting; each shape is in only one."""
    # by the shape's hash, so that a shape is on the same side in every table and every run
    test = held_out(samples, share)
    check = ~test & ((samples.shape_key // np.uint64(10_000)) % np.uint64(100) < 4)
    # too few to stop by: the training runs to its end
    if check.sum() < 20:
        check = np.zeros(len(samples), bool)
    # shuffled, as a training looks at the first of them where there are many
    order = np.random.default_rng(0).permutation(np.flatnonzero(check))
    return np.flatnonzero(~test & ~check), order, np.flatnonzero(test)


def table_hashes(tables: "Iterable[Path | str | pd.DataFrame]") -> dict[str, str]:
    """SHA-256 of every table by `folder/name` (`frame <index>` for frames), for the weights file's
    record."""
    import pandas as pd

    hashes = {}
    for index, table in enumerate(tables):
        if isinstance(table, pd.DataFrame):
            hashes[f"frame {index}"] = hashlib.sha256(
                table.to_csv(index=False).encode()
            ).hexdigest()
        else:
            # The folder tells tables of one name apart, wherever the data lie.
            path = Path(table)
            hashes["/".join(path.parts[-2:])] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes
