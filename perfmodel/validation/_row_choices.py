"""What a row of published runs leaves open and nothing else in it tells: every value that it plausibly had.

Cells are filled in, so that each choice is a row like any other. Whether a choice fits in memory, and whether anybody
would have run it beside the others, only its prediction says: see `perfmodel.validation._cases`.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod
from typing import Final

from perfmodel.validation._row_cells import Row, count, number, text

_DEGREES: Final = ("tp", "pp", "dp")
MICRO_BATCHES: Final = (1, 2, 4, 8)
MOST_STAGES: Final = 8
MOST_CONTEXT: Final = 8
MOST_CHUNKS: Final = 16


def plausible_rows(
    row: Row, micro_batch: int | None = None, narrow: str | None = None, layer_graphs: bool = False
) -> tuple[list[Row], tuple[str, ...]]:
    """The row with what it leaves open filled in, in every plausible way; and the names of what was open.

    - Two or more degrees: tensor parallelism within a node, up to `MOST_STAGES` stages and `MOST_CONTEXT` parts of the
      sequence (where that is not stated either), in powers of two, such that replicas share out the batch.
    - Degrees that contradict the devices: replicas are what the other degrees leave, as launchers have it.
    - The micro-batch: those of `MICRO_BATCHES` that divide what a replica gets.
    - Model chunks per stage, in a 1F1B pipeline or one of no stated schedule: all that divide the layers of a
      stage, and powers of two (chunks may be uneven). What a framework cannot run is left out later.
    - Over how many replicas weights are sharded, where notes say `FSDP+DP` and no number: a node and more, in powers of
      two.
    - The element type: 16 bits, and the narrower type of the framework on the device, if it has one.
    - Sequence parallelism beside tensor parallelism, where the framework is not stated: with and without.
    - CUDA graphs of layers, where neither degrees nor any other setting of the launch are stated: with and without.

    Args:
        row: cells of one run.
        micro_batch: what its framework takes where nothing is said, if that is known.
        narrow: the element type of 8 bits that its framework runs on its device, if any.
        layer_graphs: whether its framework can replay layers from CUDA graphs.

    Raises:
        Unusable: a cell that is no number.
    """
    row = _with_batch(row)
    found, names = [row], []
    for name, choices in (
        ("cuda_graphs", partial(_with_graphs, layer_graphs)), ("degrees", _with_degrees), ("dp", _with_replicas),
        ("micro_batch", _with_micro_batch), ("vpp", _with_chunks), ("sequence_parallel", _with_sequence_parallel),
        ("replicate", _with_shards), ("dtype", partial(_with_dtype, narrow)),
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


def _open_degrees(row: Row) -> bool:
    return sum(number(row, name) is None for name in _DEGREES) >= 2 and number(row, "n_devices") is not None


def _with_graphs(layer_graphs: bool, row: Row) -> Iterator[Row]:
    if layer_graphs and _open_degrees(row) and not text(row, "launch_and_overlap"):
        yield from ({**row, "launch_and_overlap": f"layer_cuda_graph={chosen}"} for chosen in (0, 1))


def _with_degrees(row: Row) -> Iterator[Row]:
    if not _open_degrees(row):
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
    if stages == 1 or text(row, "vpp") or text(row, "schedule").lower() not in ("", "1f1b"):
        return
    per_stage = max(1, count(row, "layers", stages) // stages)
    dividing = {n for n in range(1, min(MOST_CHUNKS, per_stage) + 1) if per_stage % n == 0}
    yield from ({**row, "vpp": n} for n in sorted(dividing | {*_powers(min(MOST_CHUNKS, per_stage))}))


def _with_sequence_parallel(row: Row) -> Iterator[Row]:
    if count(row, "tp", 1) == 1 or number(row, "sequence_parallel") is not None or text(row, "framework"):
        return
    yield from ({**row, "sequence_parallel": chosen} for chosen in (0, 1))


def _with_shards(row: Row) -> Iterator[Row]:
    words = text(row, "sharding")
    if words.lower() != "fsdp" or not re.search(r"fsdp\s*\+\s*dp\b", text(row, "notes").lower()):
        return
    dp, node = count(row, "dp", 1), count(row, "devices_per_node", 8)
    yield from ({**row, "sharding": f"{words} over {n} devices"} for n in _powers(dp) if min(node, dp) <= n)


def _with_dtype(narrow: str | None, row: Row) -> Iterator[Row]:
    if narrow and not text(row, "dtype") and not text(row, "dtype_recipe"):
        yield from ({**row, "dtype": dtype} for dtype in ("bf16", narrow))


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a number."""
    return tuple(1 << i for i in range(most.bit_length()))
