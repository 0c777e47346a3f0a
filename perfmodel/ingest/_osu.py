"""Output of the OSU micro-benchmarks (versions 3 to 7): collectives, latency and bandwidth.

Sizes are converted to nccl-tests': OSU gives what one rank sends to one other for all-gather and all-to-all
(`osu_allgather.c` and `osu_alltoall.c` allocate size x ranks), the whole buffer for the others. Collective
times are the mean over ranks and iterations. `osu_bw` streams windows of messages: its time of one is
size / bandwidth.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, number
from perfmodel.ingest._rows import ReadOptions, Row

_TITLE: Final = re.compile(
    r"#\s*OSU\s+(?:MPI|NCCL|RCCL|HCCL|XCCL)?(?P<memory>-\w+)?\s*(?P<test>.*?)\s*v(?P<version>[\d.]+)", re.I
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
_DTYPES: Final = {"MPI_FLOAT": "fp32", "MPI_DOUBLE": "fp64", "MPI_CHAR": "int8", "MPI_INT8_T": "int8"}
_TIMES: Final = {"Latency", "Avg Latency", "Avg Lat", "Min Latency", "Max Latency", "Min Lat", "Max Lat"}


def read_osu(path: Path, text: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of every test in a text.

    Raises:
        TableError: no OSU test in it, a line with other columns than its header, impossible numbers, other units, or
            a collective whose number of ranks nobody states.
    """
    rows: list[Row] = []
    test, software, dtype = "", "", ""
    columns: list[str] = []
    for count, raw in enumerate(text.splitlines(), 1):
        line, where = raw.strip(), f"{path}: line {count}"
        if found := _TITLE.match(line):
            test = found["test"].lower()
            software, columns, dtype = f"osu-{found['version']}{(found['memory'] or '').lower()}", [], ""
        elif line.startswith("#") and "Datatype:" in line:
            dtype = _DTYPES.get(line.split("Datatype:")[1].strip(" ."), "")
        elif re.match(r"#\s*Size\s", line):
            columns = _columns(line, where)
        elif line[:1].isdigit() and columns:
            words = line.split()
            if len(words) != len(columns):
                raise TableError(f"{where}: {len(words)} columns, the header has {len(columns)}; was it cut short?")
            rows += _row(test, dict(zip(columns, words, strict=True)), where, options, skipped, dtype, software)
    if not rows and not skipped:
        raise TableError(f"{path}: no table of an OSU benchmark in it; give the output of e.g. osu_allreduce")
    return rows


def _columns(header: str, where: str) -> list[str]:
    """Names without units, which must be us and MB/s."""
    names = []
    for cell in re.split(r"\s{2,}|\t", header.lstrip("# ").replace("(us) ", "(us)  ").replace("(MB/s) ", "(MB/s)  ")):
        found = re.fullmatch(r"(.+?)\s*\((.+)\)", cell.strip())
        name, unit = (found[1], found[2]) if found else (cell.strip(), "")
        expected = "us" if "Lat" in name else "MB/s" if "Bandwidth" in name else unit
        if unit != expected:
            raise TableError(f"{where}: {name} must be in ({expected}), the header says ({unit}); convert it")
        names.append(name)
    return names


def _row(
    test: str, cells: dict[str, str], where: str, options: ReadOptions, skipped: Counter[str], dtype: str, software: str
) -> list[Row]:
    if test not in _TESTS:
        skipped[f"no such collective in the tables: OSU {test or 'test without a title'}"] += 1
        return []
    collective, per_pair = _TESTS[test]
    size = integer(cells["Size"], "size", where)
    if size == 0:
        skipped["no bytes"] += 1
        return []
    ranks = 2 if collective == "send_recv" else options.ranks
    if ranks is None:
        raise TableError(f"{where}: OSU's output does not say how many ranks took part; say it with --ranks N")
    row: Row = {
        "source": "osu", "device": options.name_of(""), "collective": collective, "algorithm": "auto",
        "num_ranks": ranks, "bytes": size * ranks if per_pair else size, "dtype": dtype, "software": software,
        "variant": f"osu {test.removesuffix(' test')}",
    }  # fmt: skip
    row |= options.nodes(ranks)
    if "Bandwidth" in cells:
        bandwidth = number(cells["Bandwidth"], "bandwidth", where, 1e-9)
        row["time_us"] = size / bandwidth  # MB/s are bytes per us
    else:
        of_test = {name: number(cells[name], name, where, 0) for name in cells if name in _TIMES}
        mean_us = next((v for name, v in of_test.items() if not name.startswith(("Min", "Max"))), None)
        if not mean_us:
            raise TableError(f"{where}: no latency above zero in it; found columns {', '.join(cells)}")
        low = next((v for name, v in of_test.items() if name.startswith("Min")), mean_us)
        high = next((v for name, v in of_test.items() if name.startswith("Max")), mean_us)
        if not low <= mean_us * 1.001 <= high * 1.002:
            raise TableError(f"{where}: average {mean_us:g} us is not between {low:g} and {high:g} us; repair the line")
        row["time_us"] = mean_us
    if "Iterations" in cells:
        row["n_repeats"] = integer(cells["Iterations"], "iterations", where, 1)
    return [row]
