"""What a row of published runs leaves open and nothing else in it tells: every value that it plausibly had.

Cells are filled in, so that each choice is a row like any other. Whether a choice fits in memory, and whether anybody
would have run it beside the others, only its prediction says: see `perfmodel.validation._cases`.
"""

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

from perfmodel.validation._row_cells import Row, count, number, text

_DEGREES: Final = ("tp", "pp", "dp")
MICRO_BATCHES: Final = (1, 2, 4, 8)
MOST_STAGES: Final = 8
MOST_CONTEXT: Final = 8
MOST_CHUNKS: Final = 8


def plausible_rows(row: Row, micro_batch: int | None = None) -> tuple[list[Row], tuple[str, ...]]:
    """The row with what it leaves open filled in, in every plausible way; and the names of what was open.

    - Two or more degrees: tensor parallelism within a node, up to `MOST_STAGES` stages and `MOST_CONTEXT` parts of the
      sequence (where that is not stated either), in powers of two, such that replicas share out the batch.
    - Degrees that contradict the devices: replicas are what the other degrees leave, as launchers have it.
    - The micro-batch: those of `MICRO_BATCHES` that divide what a replica gets.
    - Model chunks per stage, in a pipeline whose framework and schedule are not stated: powers of two.
    - Sequence parallelism beside tensor parallelism, where the framework is not stated: with and without.

    Args:
        row: cells of one run.
        micro_batch: what its framework takes where nothing is said, if that is known.

    Raises:
        Unusable: a cell that is no number.
    """
    row = _with_batch(row)
    found, names = [row], []
    for name, choices in (
        ("degrees", _with_degrees), ("dp", _with_replicas), ("micro_batch", _with_micro_batch), ("vpp", _with_chunks),
        ("sequence_parallel", _with_sequence_parallel),
    ):  # fmt: skip
        if name == "micro_batch" and micro_batch is not None:
            continue
        filled = [list(choices(one)) for one in found]
        if any(filled):
            names.append(name)
            found = [choice for one, some in zip(found, filled, strict=True) for choice in some or [one]]
    return found, tuple(names)


def _with_batch(row: Row) -> Row:
    """With the batch that the notes tell of (`batch per DP rank 36`)."""
    per_rank = re.search(r"batch per dp rank (\d+)", text(row, "notes").lower())
    if number(row, "global_batch") is not None or not per_rank:
        return row
    others = count(row, "tp", 1) * count(row, "pp", 1) * count(row, "cp", 1)
    replicas = count(row, "dp", max(1, count(row, "n_devices", others) // others))
    return {**row, "global_batch": int(per_rank[1]) * replicas}


def _with_degrees(row: Row) -> Iterator[Row]:
    if sum(number(row, name) is None for name in _DEGREES) < 2 or number(row, "n_devices") is None:
        return
    devices, batch = count(row, "n_devices"), count(row, "global_batch", 0)
    inside = min(devices, count(row, "devices_per_node", 8))
    usual = {"tp": _powers(inside), "pp": _powers(MOST_STAGES), "cp": _powers(MOST_CONTEXT)}
    for chosen in product(*((count(row, n),) if number(row, n) is not None else usual[n] for n in usual)):
        dp, rest = divmod(devices, prod(chosen))
        if dp and not rest and (not batch or batch % dp == 0) and count(row, "dp", dp) == dp:
            yield {**row, **dict(zip(usual, chosen, strict=True)), "dp": dp}


def _with_replicas(row: Row) -> Iterator[Row]:
    if any(number(row, name) is None for name in (*_DEGREES, "n_devices")):
        return
    devices, others = count(row, "n_devices"), count(row, "tp") * count(row, "pp") * count(row, "cp", 1)
    if others * count(row, "dp") != devices and devices % others == 0:
        yield {**row, "dp": devices // others}


def _with_micro_batch(row: Row) -> Iterator[Row]:
    if number(row, "micro_batch") is not None or number(row, "num_microbatches") is not None:
        return
    batch, others = count(row, "global_batch", 0), count(row, "tp", 1) * count(row, "pp", 1) * count(row, "cp", 1)
    dp = count(row, "dp", max(1, count(row, "n_devices", others) // others))
    share = batch // dp if batch and batch % dp == 0 else 1
    yield from ({**row, "micro_batch": size} for size in MICRO_BATCHES if share % size == 0)


def _with_chunks(row: Row) -> Iterator[Row]:
    stages = count(row, "pp", 1)
    if stages == 1 or any(text(row, name) for name in ("vpp", "framework", "schedule")):
        return
    per_stage = min(MOST_CHUNKS, count(row, "layers", stages) // stages)
    yield from ({**row, "vpp": chunks} for chunks in _powers(max(1, per_stage)))


def _with_sequence_parallel(row: Row) -> Iterator[Row]:
    if count(row, "tp", 1) == 1 or number(row, "sequence_parallel") is not None or text(row, "framework"):
        return
    yield from ({**row, "sequence_parallel": chosen} for chosen in (0, 1))


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a number."""
    return tuple(1 << i for i in range(most.bit_length()))
