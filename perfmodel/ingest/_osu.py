"""Output of the OSU micro-benchmarks (versions 3 to 7): collectives, latency and bandwidth.

Sizes are converted to nccl-tests': OSU gives what one rank sends to one other for all-gather and
all-to-all (`osu_allgather.c` and `osu_alltoall.c` allocate size x ranks), the whole buffer for the
others. Collective times are the mean over ranks and iterations. `osu_bw` streams windows of
messages: its time of one is size / bandwidth.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, number
from perfmodel.ingest._rows import ReadOptions, Row

_TITLE: Final = re.compile(
    r"#\s*OSU\s+(?:MPI|NCCL|RCCL|HCCL|XCCL)?(?P<memory>-\w+)?\s*(?P<test>.*?)\s*v(?P<version>[\d.]+)",
    re.I,
)
_TESTS: Final = {
    "allreduce latency test": ("all_reduce", False),
    "allgather latency test": ("all_gather", True),
    "all-to-all personalized exchange latency test": ("all_to_all", True),
    "alltoall latency test": ("all_to_all", True),
    "reduce_scatter latency test": ("reduce_scatter", False),
    "broadcast latency test": ("broadcast", False),
    "bcast latency test": ("broadcast", False),
    "latency test": ("send_recv", False),
    "bandwidth test": ("send_recv", False),
}
"""Title -> collective, and whether its size is per pair of ranks."""
_DTYPES: Final = {
    "MPI_FLOAT": "fp32",
    "MPI_DOUBLE": "fp64",
    "MPI_CHAR": "int8",
    "MPI_INT8_T": "int8",
}
_TIMES: Final = {
    "Latency",
    "Avg Latency",
    "Avg Lat",
    "Min Latency",
    "Max Latency",
    "Min Lat",
    "Max Lat",
}


def read_osu(path: Path, text: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of every test in a text.

    Raises:
        TableError: no OSU test in it, a line with other columns than its header, impossible
            numbers, other units, or a collective whose number of ranks nobody states.
    """
    rows: list[Row] = []
    test, software, dtype = "", "", ""
    columns: list[str] = []
    for count, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        place = f"{path}: line {count}"
        # A title begins a test; its options, its header and its rows follow.
        title = _TITLE.match(line)
        if title:
            test = title["test"].lower()
            memory = (title["memory"] or "").lower()
            software = f"osu-{title['version']}{memory}"
            columns = []
            dtype = ""
        elif line.startswith("#") and "Datatype:" in line:
            dtype = _DTYPES.get(line.split("Datatype:")[1].strip(" ."), "")
        elif re.match(r"#\s*Size\s", line):
            columns = _columns(line, place)
        elif line[:1].isdigit() and columns:
            cells = line.split()
            if len(cells) != len(columns):
                raise TableError(
                    f"{place}: the line has {len(cells)} columns, the header {len(columns)}; give the whole output"
                )
            rows += _row(
                test,
                dict(zip(columns, cells, strict=True)),
                place,
                options,
                skipped,
                dtype,
                software,
            )
    if not rows and not skipped:
        raise TableError(
            f"{path}: the file has no table of an OSU benchmark; give the output of osu_allreduce or another"
        )
    return rows


def _columns(header: str, place: str) -> list[str]:
    """Names without units, which must be us and MB/s."""
    # Names may have blanks; some versions put only one after a unit, so that two columns seem to be
    # one.
    header = header.lstrip("# ").replace("(us) ", "(us)  ").replace("(MB/s) ", "(MB/s)  ")
    names = []
    for cell in re.split(r"\s{2,}|\t", header):
        with_unit = re.fullmatch(r"(.+?)\s*\((.+)\)", cell.strip())
        name, unit = (with_unit[1], with_unit[2]) if with_unit else (cell.strip(), "")
        expected = unit
        if "Lat" in name:
            expected = "us"
        elif "Bandwidth" in name:
            expected = "MB/s"
        if unit != expected:
            raise TableError(
                f"{place}: {name} must be in ({expected}), but the header says ({unit}); convert the column"
            )
        names.append(name)
    return names


def _row(
    test: str,
    cells: dict[str, str],
    place: str,
    options: ReadOptions,
    skipped: Counter[str],
    dtype: str,
    software: str,
) -> list[Row]:
    """The row of one line; empty for a test or size without one (raises `TableError` as
    `read_osu`)."""
    if test not in _TESTS:
        skipped[f"no such collective in the tables: OSU {test or 'test without a title'}"] += 1
        return []
    collective, per_pair = _TESTS[test]
    size = integer(cells["Size"], "size", place)
    if size == 0:
        skipped["no bytes"] += 1
        return []
    ranks = 2 if collective == "send_recv" else options.ranks
    if ranks is None:
        raise TableError(
            f"{place}: the number of ranks is missing from OSU's output; give --ranks N"
        )
    row: Row = {
        "source": "osu",
        "device": options.name_of(""),
        "collective": collective,
        "algorithm": "auto",
        "num_ranks": ranks,
        "bytes": size * ranks if per_pair else size,
        "dtype": dtype,
        "software": software,
        "variant": f"osu {test.removesuffix(' test')}",
    }
    row |= options.nodes(ranks)
    if "Bandwidth" in cells:
        bandwidth = number(cells["Bandwidth"], "bandwidth", place, 1e-9)
        # MB/s are bytes per us.
        row["time_us"] = size / bandwidth
    else:
        row["time_us"] = _mean_latency_us(cells, place)
    if "Iterations" in cells:
        row["n_repeats"] = integer(cells["Iterations"], "iterations", place, 1)
    return [row]


def _mean_latency_us(cells: dict[str, str], place: str) -> float:
    """The mean latency over ranks, which lies between the least and the largest where they are
    printed."""
    # The mean is always there, under one of several names. With `-f` two more columns say the
    # spread over ranks.
    mean_us = least_us = most_us = None
    for name in cells:
        if name not in _TIMES:
            continue
        latency_us = number(cells[name], name, place, 0)
        if name.startswith("Min"):
            least_us = latency_us
        elif name.startswith("Max"):
            most_us = latency_us
        elif mean_us is None:
            mean_us = latency_us
    if not mean_us:
        raise TableError(
            f"{place}: all latencies are zero; the columns are {', '.join(cells)}; measure again"
        )
    low = mean_us if least_us is None else least_us
    high = mean_us if most_us is None else most_us
    # Printed with few digits, equal times may differ in the last one.
    if not low <= mean_us * 1.001 <= high * 1.002:
        raise TableError(
            f"{place}: average {mean_us:g} us must be between {low:g} and {high:g} us; correct the line"
        )
    return mean_us
