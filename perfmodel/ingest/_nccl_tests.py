"""Output of NVIDIA's nccl-tests (and AMD's rccl-tests): the printed table of all versions.

A section of the text is: comment lines that name the test, its settings and its ranks; a header of two lines
(columns and units); a line per size; the number of wrong values. Sizes follow the project's own columns, which
are nccl-tests'. The time is the mean over the iterations of a size, as nccl-tests prints it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, number
from perfmodel.ingest._rows import ReadOptions, Row

COLLECTIVES: Final = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send_recv", "broadcast": "broadcast",
}  # fmt: skip
DTYPES: Final = {
    "float": "fp32", "half": "fp16", "bfloat16": "bf16", "double": "fp64", "int8": "int8", "uint8": "int8",
    "f8e4m3": "fp8", "f8e5m2": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
}  # fmt: skip
_TESTS: Final = re.compile(r"\b(\w+?)_perf(?:_mpi)?\b")
_RANK: Final = re.compile(
    r"#\s*Rank\s+\d+(?:\s+Group\s+(?P<group>\d+))?\s+Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+"
    r"\[[^\]]*\]\s+(?P<name>.+)"
)
_ITERATIONS: Final = re.compile(r"(?<!warmup )iters: (\d+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_NCCL_VERSION: Final = re.compile(r"[NR]CCL version (\d[\w.]*)")
_SET_BY: Final = re.compile(r"\b(NCCL_\w+) set by environment to (\S+?)\.?$")
_WRONG: Final = re.compile(r"#?\s*Out of bounds values\s*:\s*(\S+)\s*(\S*)")
_PREFIX: Final = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>:\s?")
"""What `mpirun --tag-output` puts before every line."""
_UNITS: Final = {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}


@dataclass
class _Section:
    """One run of one test, as far as it has been read."""

    where: Path
    test: str = ""
    iterations: int = 1
    nccl: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    ranks: list[tuple[str, str, str]] = field(default_factory=list)
    """Group, host and device name; hosts only to count them."""
    columns: list[str] = field(default_factory=list)
    units_seen: bool = False
    first_row: int = 0
    rows: list[Row] = field(default_factory=list)


def read_nccl_text(path: Path, text: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of every section of a text.

    Raises:
        TableError: a section without its end, wrong values, a line with too few columns, impossible numbers, other
            units, or nothing that says the test or its ranks.
    """
    rows: list[Row] = []
    section = _Section(path)
    for count, raw in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", raw).strip()
        where = f"{path}: line {count}"
        if found := _WRONG.match(line):
            if number(found[1], "the number of wrong values", where, 0) != 0 or found[2] == "FAILED":
                raise TableError(f"{where}: {found[1]} values came out wrong ({section.test}); do not use this run")
            rows += section.rows
            # what follows may be the next test of the same ranks
            section = _Section(path, nccl=section.nccl, ranks=section.ranks, settings=section.settings)
        elif section.columns and line[:1].isdigit() and not line.startswith("#"):
            section.first_row = section.first_row or count
            section.rows += _data(section, line.split(), where, options, skipped)
        else:
            _comment(section, line, where)
    if section.columns:
        raise TableError(
            f"{path}: the table of {section.test or 'a test'} has no 'Out of bounds values' line after it: the run "
            "was cut short; run it again"
        )
    if not rows and not skipped:
        raise TableError(f"{path}: no table of nccl-tests in it; give the output of e.g. all_reduce_perf")
    return rows


def _comment(section: _Section, line: str, where: str) -> None:
    """Take from a comment what it says of the run."""
    if found := _RANK.match(line):
        section.ranks.append((found["group"] or "0", found["host"], found["name"].strip()))
    elif line.startswith("#") and {"size", "count", "type"} <= set(line.split()):
        section.columns, section.units_seen = line.lstrip("# ").split(), False
    elif line.startswith("#") and section.columns and not section.units_seen and "(" in line:
        units = {word for word in line.split() if word.startswith("(")}
        if "(us)" not in units or "(B)" not in units or units - _UNITS:
            odd = ", ".join(sorted(units - _UNITS)) or "no (us) or no (B)"
            raise TableError(f"{where}: sizes are read in (B) and times in (us), the header has {odd}; convert it")
        section.units_seen = True
    else:
        if "Using devices" in line:
            section.ranks = []
        section.test = test_of(line) or section.test
        if found := _ITERATIONS.search(line):
            section.iterations = integer(found[1], "iters", where, 1)
        if found := _LIBRARY.search(line):
            section.nccl = nccl_version(int(found[1]))
        elif found := _NCCL_VERSION.search(line):
            section.nccl = found[1].split("+")[0]
        if found := _SET_BY.search(line):
            section.settings |= allowed([f"{found[1]}={found[2]}"])


def test_of(text: str) -> str:
    """The test that a name of a program in the text tells, or nothing."""
    found = _TESTS.search(text)
    return found[1] if found else ""


def _data(section: _Section, words: list[str], where: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of one line: out of place, and in place."""
    if not section.units_seen:
        raise TableError(f"{where}: no line of units before it; times must be in (us)")
    columns = section.columns
    width = len(columns) + columns.count("timestamp")  # a date and a time of day
    if len(words) != width:
        raise TableError(f"{where}: {len(words)} columns where the header has {width}; was the output cut short?")
    blocks = [at for at, name in enumerate(columns) if name in ("time", "cputime")]
    size = number(words[columns.index("size")], "size", where, 0)
    dtype = words[columns.index("type")]
    made = []
    for layout, at, end in zip(("out_of_place", "in_place"), blocks, [*blocks[1:], len(columns)], strict=False):
        of_block = dict(zip(columns[at:end], words[at:end], strict=True))
        if columns[at] == "cputime":
            skipped["time of the CPU (nccl-tests -C), not of the collective"] += 1
            continue
        if of_block.get("#wrong", "0") not in ("0", "N/A"):
            raise TableError(f"{where}: {of_block['#wrong']} wrong values {layout}; do not use this run")
        time_us = checked_time_us(of_block["time"], of_block["algbw"], size, where)
        row = collective_row(section.test, options, where, size, dtype, skipped)
        if row is None:
            continue
        run = group_columns(section.ranks, options, where)
        kept = {"algorithm": algorithm(section.settings), "variant": variant(layout, section.settings)}
        software = f"nccl-{section.nccl}" if section.nccl else "nccl-tests"
        made.append(row | run | kept | {"time_us": time_us, "n_repeats": section.iterations, "software": software})
    return made


def checked_time_us(time_us: object, algbw: object, size: float, where: str) -> float:
    """The time, held against the bandwidth that is printed beside it (GB/s = bytes / us / 1000)."""
    time = number(time_us, "time", where, 0)
    bandwidth = number(algbw, "algbw", where, 0)
    if time == 0:
        raise TableError(f"{where}: a time of 0 us; the timer did not run, measure again")
    if abs(size / time / 1e3 - bandwidth) > 0.011 + 0.02 * bandwidth:
        raise TableError(
            f"{where}: {size:.0f} bytes in {time:g} us are {size / time / 1e3:.4g} GB/s, the algbw column says "
            f"{bandwidth:g}; are units mixed?"
        )
    return time


def collective_row(
    test: str, options: ReadOptions, where: str, size: float, dtype: str, skipped: Counter[str]
) -> Row | None:
    """The columns that say which collective; none for one without a row of its own.

    Raises:
        TableError: a file that names no program where the user does not either, or another than the user.
    """
    if not test and not options.collective:
        raise TableError(
            f"{where}: nothing says which collective this is; keep the line with the command's name, or say it with "
            "--collective NAME"
        )
    said = options.collective
    if test and said and COLLECTIVES.get(test) != said:
        raise TableError(f"{where}: this is {test}_perf, not {said}; leave --collective out")
    test = test or next(name for name, kind in COLLECTIVES.items() if kind == said)
    if test not in COLLECTIVES:
        skipped[f"no such collective in the tables: {test}"] += 1
        return None
    if size == 0:
        skipped["no bytes"] += 1
        return None
    if dtype not in DTYPES:
        skipped[f"no such element type in the tables: {dtype}"] += 1
        return None
    return {"source": "nccl-tests", "collective": COLLECTIVES[test], "bytes": int(size), "dtype": DTYPES[dtype]}


def group_columns(ranks: Sequence[tuple[str, str, str]], options: ReadOptions, where: str) -> Row:
    """Device and group of a run: group, host and device name of the ranks that the file lists.

    Raises:
        TableError: ranks that nobody states, of different devices, or another number than the user says.
    """
    if not ranks and options.ranks is None:
        raise TableError(f"{where}: the file lists no ranks ('# Rank 0 ...'); say how many with --ranks N")
    names = {name for _, _, name in ranks}
    if len(names) > 1:
        found = ", ".join(sorted(names))
        raise TableError(f"{where}: ranks on different devices ({found}); measure one kind at a time")
    device = options.name_of(min(names, default=""))
    if not ranks:
        return {"device": device, "num_ranks": options.ranks} | options.nodes(options.ranks or 0)
    # communicators that run side by side (NCCL_TESTS_SPLIT) are alike
    group = Counter(group for group, _, _ in ranks).most_common(1)[0][0]
    on_host = Counter(host for of_group, host, _ in ranks if of_group == group)
    count = sum(on_host.values())
    if options.ranks is not None and options.ranks != count:
        raise TableError(f"{where}: the file lists {count} ranks, not {options.ranks}; leave --ranks out")
    nodes = {"num_nodes": len(on_host), "ranks_per_node": max(on_host.values())}
    return {"device": device, "num_ranks": count} | nodes | options.nodes(count)


def nccl_version(code: int) -> str:
    """`22809` -> `2.28.9` (from 2.9 on; older codes have one digit for the minor version)."""
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def algorithm(settings: dict[str, str]) -> str:
    """The `algorithm` column: what NCCL was told, or that it chose."""
    return settings.get("NCCL_ALGO", "auto").lower()


ALLOWED: Final = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC",
        "NCCL_CUMEM_ENABLE", "NCCL_IB_DISABLE", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_LAUNCH_MODE", "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE", "NCCL_NET_GDR_LEVEL",
        "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_PROTO", "NCCL_SHM_DISABLE",
    }
)  # fmt: skip
"""Variables that are kept."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_,:;^=+-]{1,64}")
"""Values that are kept: no dots or slashes, so neither hosts nor addresses nor paths."""


def allowed(variables: Iterable[str]) -> dict[str, str]:
    """Of `NAME=value` texts those that are in the allow-list and have plain values, by name."""
    pairs = (text.partition("=") for text in variables)
    return {name: value for name, _, value in sorted(pairs) if name in ALLOWED and _PLAIN.fullmatch(value)}


def variant(layout: str, settings: dict[str, str]) -> str:
    """The `variant` column: where in memory, and the settings that were kept."""
    return ";".join([layout, *(f"{name}={value}" for name, value in settings.items())])
