"""Variants: how passes of one stage differ in duration."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from perfmodel.schedule import Schedule


@dataclass(frozen=True)
class Variants:
    """The variants that occur in a schedule, the plain one first; see `Structure.variants`."""

    table: Int[np.ndarray, "variants 3"]
    of_pass: Int[np.ndarray, " instructions"]
    """Variant of each instruction."""
    of_transfer: Int[np.ndarray, " instructions"]
    """Variant of what each instruction sends on: only the number of micro-batches counts."""


def variants_of(schedule: Schedule) -> Variants:
    """Find the variants of a schedule's passes and transfers."""
    span = schedule.span.astype(np.int64)
    piece = schedule.micro_batch % schedule.slices
    paired = schedule.paired | np.append(False, schedule.paired[:-1])
    # numbers that sort in the order of the table's rows; the plain variant is the smallest
    most = schedule.slices * 2
    of_pass, of_transfer = span * most + piece * 2 + paired, span * most
    codes = np.unique(np.concatenate([[most], of_pass, of_transfer]))
    table = np.stack([codes // most, codes % most // 2, codes % 2], axis=1).astype(np.int32)
    return Variants(table, np.searchsorted(codes, of_pass), np.searchsorted(codes, of_transfer))
