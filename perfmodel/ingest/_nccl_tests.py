"""Output of NVIDIA's nccl-tests (and AMD's rccl-tests): the printed table of all versions.

A section of the text is: comment lines that name the test, its settings and its ranks; a header of two lines
(columns and units); a line per size; the number of wrong values. Sizes follow the project's own columns, which
are nccl-tests'. The time is the mean over the iterations of a size, as nccl-tests prints it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._bandwidth_ratio import BandwidthRatio, clearest_ratio
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
    r"#?\s*Rank\s+(?P<rank>\d+)(?:\s+Group\s+(?P<group>\d+))?\s+Pid\s+\d+\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<device>\d+)\s+\[[^\]]*\]\s+(?P<name>.+)"
)
_ITERATIONS: Final = re.compile(r"(?<!warmup )iters: (\d+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_NCCL_VERSION: Final = re.compile(r"[NR]CCL version (\d[\w.]*)")
_SET_BY: Final = re.compile(r"\b(NCCL_\w+) set by environment to (\S+?)\.?$")
_WRONG: Final = re.compile(r"#?\s*Out of bounds values\s*:\s*(\S+)\s*(\S*)")
_LABEL: Final = re.compile(
    r"""\s*(?:
        \[[^\]\s]*\](?:<\w+>)?:?          # mpirun --tag-output, mpiexec, kubectl --prefix
        | \(\S+,?\s*pid=\d+[^)]*\)       # Ray
        | \d+:(?=\s)                     # srun --label
        | [A-Za-z][\w.-]*(?:\[\d+\])?:(?=\s+[#\d]|\s*\#)  # pdsh, kubectl: the host's or the pod's name
    )\s?""",
    re.VERBOSE,
)
"""What launchers put before every line."""
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
    highest_rank: int = -1
    """Number of the last rank that is listed: an excerpt may leave out others."""
    highest_device: int = -1
    """The same of a host's devices."""
    columns: list[str] = field(default_factory=list)
    units_seen: bool = False
    first_row: int = 0
    lines: list["_Line"] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """One line of a table, column by column."""

    where: str
    columns: Sequence[str]
    words: Sequence[str]

    def word(self, name: str) -> str:
        """What stands under the first column of this name; nothing where there is no such column."""
        return self.words[self.columns.index(name)] if name in self.columns else ""

    def blocks(self) -> dict[str, dict[str, str]]:
        """By where the result lies, the columns from a time to the next one."""
        starts = [at for at, name in enumerate(self.columns) if name in ("time", "cputime")]
        ends = [*starts[1:], len(self.columns)]
        found = {}
        for layout, start, end in zip(("out_of_place", "in_place"), starts, ends, strict=False):
            found[layout] = dict(zip(self.columns[start:end], self.words[start:end], strict=True))
        return found

    def bandwidths(self) -> tuple[float, float] | None:
        """Algorithm and bus bandwidth out of place, GB/s; None where they are not printed."""
        try:
            return float(self.word("algbw")), float(self.word("busbw"))
        except ValueError:
            return None


def read_nccl_text(path: Path, text: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of every section of a text.

    Raises:
        TableError: a section without its end, wrong values, a line with too few columns, impossible numbers, other
            units, or nothing that says the test or its ranks.
    """
    rows: list[Row] = []
    section = _Section(path)
    for count, raw in enumerate(text.splitlines(), 1):
        line = _without_label(raw)
        where = f"{path}: line {count}"
        if found := _WRONG.match(line):
            if number(found[1], "the number of wrong values", where, 0) != 0 or found[2] == "FAILED":
                raise TableError(f"{where}: {found[1]} values came out wrong ({section.test}); do not use this run")
            rows += _section_rows(section, options, skipped)
            # what follows may be the next test of the same ranks
            section = replace(section, test="", iterations=1, columns=[], units_seen=False, first_row=0, lines=[])
        elif section.columns and line[:1].isdigit() and not line.startswith("#"):
            section.first_row = section.first_row or count
            section.lines.append(_line(section, line.split(), where))
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


def _without_label(raw: str) -> str:
    """A line without what a launcher put before it."""
    label = _LABEL.match(raw)
    return (raw[label.end() :] if label else raw).strip()


def _comment(section: _Section, line: str, where: str) -> None:
    """Take from a comment what it says of the run; some logs have lost the signs that begin comments."""
    if found := _RANK.match(line):
        section.ranks.append((found["group"] or "0", found["host"], found["name"].strip()))
        section.highest_rank = max(section.highest_rank, int(found["rank"]))
        section.highest_device = max(section.highest_device, int(found["device"]))
    elif {"size", "count", "type", "time"} <= set(line.split()):
        section.columns, section.units_seen = line.lstrip("# ").split(), False
    elif section.columns and not section.units_seen and line.lstrip("# ").startswith("("):
        units = {word for word in line.split() if word.startswith("(")}
        if "(us)" not in units or "(B)" not in units or units - _UNITS:
            odd = ", ".join(sorted(units - _UNITS)) or "no (us) or no (B)"
            raise TableError(f"{where}: sizes are read in (B) and times in (us), the header has {odd}; convert it")
        section.units_seen = True
    else:
        if "Using devices" in line:
            section.ranks, section.highest_rank, section.highest_device = [], -1, -1
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


def _line(section: _Section, words: list[str], where: str) -> _Line:
    """A line of the table, with blanks filled in: tests that reduce nothing or have no root leave these columns empty.

    Raises:
        TableError: there is no line of units above it, or it has too few columns.
    """
    if not section.units_seen:
        raise TableError(f"{where}: no line of units before it; times must be in (us)")
    columns = section.columns
    width = len(columns) + columns.count("timestamp")  # a date and a time of day
    for name in ("redop", "root"):
        at = columns.index(name) if name in columns else len(words)
        if len(words) < width and at < len(words) and _is_blank(name, words, at):
            words = [*words[:at], "", *words[at:]]
    if len(words) != width:
        raise TableError(f"{where}: {len(words)} columns where the header has {width}; was the output cut short?")
    line = _Line(where, columns, words)
    for layout, block in line.blocks().items():
        if "time" in block and block.get("#wrong", "0") not in ("0", "N/A"):
            raise TableError(f"{where}: {block['#wrong']} wrong values {layout}; do not use this run")
    return line


def _is_blank(name: str, words: Sequence[str], at: int) -> bool:
    """Whether the word under a column is that of the next one, as the column is empty."""
    if name == "redop":
        return not words[at][:1].isalpha()
    return "." in words[at]  # a root is a whole number, the time after it is printed with decimals


def _section_rows(section: _Section, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of a whole section."""
    rows = []
    for line in section.lines:
        rows += _data(section, line, options, skipped)
    return rows


def _data(section: _Section, line: _Line, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of one line: out of place, and in place."""
    where = line.where
    size = number(line.word("size"), "size", where, 0)
    made = []
    for layout, block in line.blocks().items():
        if "cputime" in block:
            skipped["time of the CPU (nccl-tests -C), not of the collective"] += 1
            continue
        time_us = checked_time_us(block["time"], block["algbw"], size, where)
        test, ranks = _identified(section, options, where)
        row = collective_row(test, options, where, size, line.word("type"), skipped)
        if row is None:
            continue
        kept = {"algorithm": algorithm(section.settings), "variant": variant(layout, section.settings)}
        software = f"nccl-{section.nccl}" if section.nccl else "nccl-tests"
        made.append(row | ranks | kept | {"time_us": time_us, "n_repeats": section.iterations, "software": software})
    return made


def _identified(section: _Section, options: ReadOptions, where: str) -> tuple[str, Row]:
    """The test of a section, and the columns of its ranks: as the log says, and where it is silent or has lost lines as
    its bandwidths tell.

    Raises:
        TableError: the log and its bandwidths contradict one another, or neither says enough.
    """
    bandwidths = [pair for line in section.lines if (pair := line.bandwidths()) is not None]
    ratio = clearest_ratio(bandwidths)
    if ratio is None or not section.lines:
        return section.test, group_columns(section.ranks, options, where)
    listed = group_columns(section.ranks, options, where) if section.ranks or options.ranks else None
    stated = next((name for name, kind in COLLECTIVES.items() if kind == options.collective), "")
    test = section.test or stated or _test_by_ratio(section, ratio, listed, where)
    by_ratio = ratio.ranks(test)
    if listed is None:
        if by_ratio is None:
            return test, group_columns(section.ranks, options, where)
        return test, group_columns([], replace(options, ranks=by_ratio), where)
    if ratio.allows(test, listed["num_ranks"]):
        return test, listed
    # An excerpt lists some ranks only; the number of the last one and the bandwidths agree on how many there are.
    if by_ratio is not None and by_ratio == section.highest_rank + 1 and options.ranks is None:
        per_node = section.highest_device + 1
        if options.ranks_per_node is None and by_ratio % per_node == 0:
            options = replace(options, ranks_per_node=per_node)
        whole = group_columns([], replace(options, ranks=by_ratio), where)
        return test, whole | {"device": listed["device"]}
    says = f"among {by_ratio} ranks" if by_ratio is not None else "of another collective or number of ranks"
    raise TableError(
        f"{where}: bus bandwidth over algorithm bandwidth is {ratio.ratio:.3f}, which is that {says}, but the log "
        f"names {test}_perf among {listed['num_ranks']}; give the whole log, or --collective and --ranks"
    )


def _test_by_ratio(section: _Section, ratio: BandwidthRatio, listed: Row | None, where: str) -> str:
    """The one test that a log's bandwidths, reduction and root allow; nothing where none does.

    Raises:
        TableError: several do.
    """
    line = section.lines[0]
    root = line.word("root") if "root" in line.columns else None
    fitting = ratio.tests(line.word("redop"), root, None if listed is None else listed["num_ranks"])
    if len(fitting) > 1:
        kinds = " or ".join(COLLECTIVES.get(test, test) for test in fitting)
        raise TableError(
            f"{where}: the log does not name the test; its bandwidths are those of {kinds}; say which with "
            "--collective NAME"
        )
    return fitting[0] if fitting else ""


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
