"""Output of NVIDIA's nccl-tests (and AMD's rccl-tests): the printed table of all versions.

A section of the text is: comment lines that name the test, its settings and its ranks; a header of
two lines (columns and units); a line per size; the number of wrong values. Sizes follow the
project's own columns, which are nccl-tests'. The time is the mean over the iterations of a size, as
nccl-tests prints it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from perfmodel.errors import TableError
from perfmodel.ingest._bandwidth_ratio import BandwidthRatio, clearest_ratio
from perfmodel.ingest._files import integer, number
from perfmodel.ingest._launcher_labels import HEADING, label_of_header, without_label
from perfmodel.ingest._nccl_settings import algorithm, allowed, nccl_version, variant
from perfmodel.ingest._rows import ReadOptions, Row

COLLECTIVES: Final = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
}
DTYPES: Final = {
    "float": "fp32",
    "half": "fp16",
    "bfloat16": "bf16",
    "double": "fp64",
    "int8": "int8",
    "uint8": "int8",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
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
_CONCLUDED: Final = re.compile(r"#?\s*(Avg bus bandwidth\s*:|Collective test concluded)")
"""Lines after the number of wrong values, which excerpts leave out (each row has its own)."""
_DOTS: Final = re.compile(r"\[?(\.{2,}|…)\]?")
"""A line that stands for others in an excerpt."""
_UNITS: Final = {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}


class ListedRank(NamedTuple):
    """A rank listed in a log; hosts are only counted."""

    group: str
    host: str
    device_name: str


@dataclass
class _Section:
    """The part of one run of a test that has been read so far."""

    place: Path
    test: str = ""
    iterations: int = 1
    nccl: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    ranks: list[ListedRank] = field(default_factory=list)
    highest_rank: int = -1
    """Highest listed rank, because an excerpt may leave out others."""
    highest_device: int = -1
    """Highest listed device number of any host."""
    lacks_ranks: bool = False
    """Whether dots stand for ranks that an excerpt leaves out."""
    columns: list[str] = field(default_factory=list)
    units_seen: bool = False
    first_row: int = 0
    lines: list["_Line"] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    """One line of a table, column by column."""

    place: str
    columns: Sequence[str]
    cells: Sequence[str]

    def cell(self, name: str) -> str:
        """Text under the first column of this name; empty if there is no such column."""
        return self.cells[self.columns.index(name)] if name in self.columns else ""

    def blocks(self) -> dict[str, dict[str, str]]:
        """Columns of the results out of place and in place: each block reaches from a time to the
        next one."""
        starts = [index for index, name in enumerate(self.columns) if name in ("time", "cputime")]
        ends = [*starts[1:], len(self.columns)]
        blocks = {}
        for layout, start, end in zip(("out_of_place", "in_place"), starts, ends, strict=False):
            blocks[layout] = dict(zip(self.columns[start:end], self.cells[start:end], strict=True))
        return blocks

    def bandwidths(self) -> tuple[float, float] | None:
        """Algorithm and bus bandwidth out of place, GB/s; None where they are not printed."""
        try:
            return float(self.cell("algbw")), float(self.cell("busbw"))
        except ValueError:
            return None


def read_nccl_text(path: Path, text: str, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of every section of a text.

    Raises:
        TableError: a section without its end, wrong values, a line with too few columns, impossible
            numbers, other units, or nothing that says the test or its ranks.
    """
    rows: list[Row] = []
    section = _Section(path)
    label = label_of_header(text)
    # The number of wrong values ends a section, a line that begins with a digit
    # is a row of its table, and all else is a comment or noise of the job.
    lines = text.splitlines()
    for count, raw in enumerate(lines, 1):
        line = without_label(raw, label)
        # Dots in brackets look like a label.
        if section.ranks and any(_DOTS.fullmatch(text.strip("# ")) for text in (raw, line)):
            section.lacks_ranks = True
        place = f"{path}: line {count}"
        verdict = _WRONG.match(line)
        if verdict:
            wrong = number(verdict[1], "the number of wrong values", place, 0)
            if wrong != 0 or verdict[2] == "FAILED":
                raise TableError(
                    f"{place}: {section.test} computed {verdict[1]} wrong values; run the test again"
                )
        if verdict or (section.lines and _CONCLUDED.match(line)):
            section.test = section.test or _concluded_test(lines[count - 1 :])
            rows += _section_rows(section, options, skipped)
            # The next lines may be another test of the same ranks.
            section = replace(
                section, test="", iterations=1, columns=[], units_seen=False, first_row=0, lines=[]
            )
        elif section.columns and line[:1].isdigit() and not line.startswith("#"):
            section.first_row = section.first_row or count
            section.lines.append(_line(section, line.split(), place))
        else:
            _comment(section, line, place)
    # A section whose end is missing was cut short: its last size may have fewer iterations than it
    # states.
    if section.columns:
        raise TableError(
            f"{path}: the table of {section.test or 'a test'} has no 'Out of bounds values' line after it: the run "
            "was cut short; run it again"
        )
    if not rows and not skipped:
        raise TableError(
            f"{path}: the file has no table of nccl-tests; give the output of all_reduce_perf or another test"
        )
    return rows


def _concluded_test(following: Sequence[str]) -> str:
    """Test that the end of a section names (`Collective test concluded: all_reduce_perf`); empty if
    another section comes first."""
    for line in following:
        if "Collective test concluded" in line:
            return test_of(line)
        if "Collective test starting" in line or HEADING.match(line):
            break
    return ""


def _comment(section: _Section, line: str, place: str) -> None:
    """Record in `section` the facts about the run that a comment states.

    Some logs have lost the signs that begin comments: every line that is not of the table comes
    here.
    """
    # From the most particular line to the least: a rank, the header of a table, its line of units,
    # settings.
    rank = _RANK.match(line)
    if rank:
        section.ranks.append(ListedRank(rank["group"] or "0", rank["host"], rank["name"].strip()))
        section.highest_rank = max(section.highest_rank, int(rank["rank"]))
        section.highest_device = max(section.highest_device, int(rank["device"]))
    elif {"size", "count", "type", "time"} <= set(line.split()):
        section.columns, section.units_seen = line.lstrip("# ").split(), False
    elif section.columns and not section.units_seen and line.lstrip("# ").startswith("("):
        units = {unit for unit in line.split() if unit.startswith("(")}
        if "(us)" not in units or "(B)" not in units or units - _UNITS:
            odd = ", ".join(sorted(units - _UNITS)) or "no (us) or no (B)"
            raise TableError(
                f"{place}: sizes must be in (B) and times in (us), but the header has {odd}; convert the columns"
            )
        section.units_seen = True
    else:
        # The list of ranks begins anew: the job runs a test with other ranks.
        if "Using devices" in line:
            section.ranks, section.highest_rank, section.highest_device = [], -1, -1
            section.lacks_ranks = False
        section.test = test_of(line) or section.test
        iterations = _ITERATIONS.search(line)
        if iterations:
            section.iterations = integer(iterations[1], "iters", place, 1)
        # The library's own number, where it is printed, is that of the one that ran.
        library = _LIBRARY.search(line)
        version = _NCCL_VERSION.search(line)
        if library:
            section.nccl = nccl_version(int(library[1]))
        elif version:
            section.nccl = version[1].split("+")[0]
        variable = _SET_BY.search(line)
        if variable:
            section.settings |= allowed([f"{variable[1]}={variable[2]}"])


def test_of(text: str) -> str:
    """Test whose program the text names (`all_reduce_perf`: `all_reduce`), or nothing."""
    program = _TESTS.search(text)
    return program[1] if program else ""


def _line(section: _Section, cells: list[str], place: str) -> _Line:
    """A line of the table, with blanks filled in: tests that reduce nothing or have no root leave
    these columns empty.

    Raises:
        TableError: there is no line of units above it, or it has too few columns.
    """
    if not section.units_seen:
        raise TableError(
            f"{place}: a line of units must come before it, with times in (us); add that line"
        )
    columns = section.columns
    # A timestamp is two cells: a date and a time of day.
    width = len(columns) + columns.count("timestamp")
    # The printed table has fixed columns and leaves cells blank; split at blanks, such cells
    # vanish.
    for name in ("redop", "root"):
        index = columns.index(name) if name in columns else len(cells)
        if len(cells) < width and index < len(cells) and _is_blank(name, cells, index):
            cells = [*cells[:index], "", *cells[index:]]
    if len(cells) != width:
        raise TableError(
            f"{place}: the line has {len(cells)} columns, the header {width}; give the whole output"
        )
    line = _Line(place, columns, cells)
    for layout, block in line.blocks().items():
        if "time" in block and block.get("#wrong", "0") not in ("0", "N/A"):
            raise TableError(
                f"{place}: the run computed {block['#wrong']} wrong values {layout}; run the test again"
            )
    return line


def _is_blank(name: str, cells: Sequence[str], index: int) -> bool:
    """Whether a column is empty, so that the cell at its index belongs to the next column."""
    if name == "redop":
        return not cells[index][:1].isalpha()
    # A root is a whole number, the time after it is printed with decimals.
    return "." in cells[index]


def _section_rows(section: _Section, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of a whole section."""
    rows = []
    for line in section.lines:
        rows += _data(section, line, options, skipped)
    return rows


def _data(section: _Section, line: _Line, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """Rows of one line: out of place, and in place."""
    place = line.place
    size = number(line.cell("size"), "size", place, 0)
    rows = []
    for layout, block in line.blocks().items():
        if "cputime" in block:
            skipped["time of the CPU (nccl-tests -C), not of the collective"] += 1
            continue
        time_us = checked_time_us(block["time"], block["algbw"], size, place)
        # Both are the same for all lines of a section, but errors shall name the line at hand.
        test, ranks = _identified(section, options, place)
        row = collective_row(test, options, place, size, line.cell("type"), skipped)
        if row is None:
            continue
        row |= ranks
        row["algorithm"] = algorithm(section.settings)
        row["variant"] = variant(layout, section.settings)
        row["time_us"] = time_us
        row["n_repeats"] = section.iterations
        row["software"] = f"nccl-{section.nccl}" if section.nccl else "nccl-tests"
        rows.append(row)
    return rows


def _identified(section: _Section, options: ReadOptions, place: str) -> tuple[str, Row]:
    """The test of a section, and the columns of its ranks.

    Both are as the log states them. Where it is silent or has lost lines, the ratio of bus
    bandwidth to algorithm bandwidth tells them: it follows from the collective and the number of
    ranks (all-reduce: 2 (n - 1) / n).

    Raises:
        TableError: the log and its bandwidths contradict one another, or neither says enough.
    """
    bandwidths = []
    for line in section.lines:
        pair = line.bandwidths()
        if pair is not None:
            bandwidths.append(pair)
    ratio = clearest_ratio(bandwidths)
    # Bandwidths too small to tell anything (short messages alone): the log's own word counts.
    if ratio is None or not section.lines:
        return section.test, group_columns(section.ranks, options, place)

    # Compare what the log or the user states with what the bandwidths imply.
    stated_group = (
        group_columns(section.ranks, options, place) if section.ranks or options.ranks else None
    )
    stated_test = next(
        (name for name, kind in COLLECTIVES.items() if kind == options.collective), ""
    )
    test = section.test or stated_test or _test_by_ratio(section, ratio, stated_group, place)
    by_ratio = ratio.ranks(test)

    # The log does not state its ranks: infer them from the bandwidths if possible.
    if stated_group is None:
        if by_ratio is None:
            return test, group_columns(section.ranks, options, place)
        return test, group_columns([], replace(options, ranks=by_ratio), place)
    if ratio.allows(test, stated_group["num_ranks"]):
        return test, stated_group
    # An excerpt lists some ranks only; the number of the last one and the bandwidths agree on how
    # many there are.
    if by_ratio is not None and by_ratio == section.highest_rank + 1 and options.ranks is None:
        per_node = section.highest_device + 1
        if options.ranks_per_node is None and by_ratio % per_node == 0:
            options = replace(options, ranks_per_node=per_node)
        group = group_columns([], replace(options, ranks=by_ratio), place)
        return test, group | {"device": stated_group["device"]}
    if by_ratio is not None and section.lacks_ranks and by_ratio > stated_group["num_ranks"]:
        group = group_columns([], replace(options, ranks=by_ratio), place)
        return test, group | {"device": stated_group["device"]}
    says = f"{by_ratio} ranks" if by_ratio is not None else "another collective or number of ranks"
    raise TableError(
        f"{place}: bus bandwidth over algorithm bandwidth is {ratio.ratio:.3f}, which fits {says}, but the log "
        f"names {test}_perf on {stated_group['num_ranks']} ranks; give the whole log, or --collective and --ranks"
    )


def _test_by_ratio(
    section: _Section, ratio: BandwidthRatio, stated_group: Row | None, place: str
) -> str:
    """The only test that a log's bandwidths, reduction and root allow; empty if there is none.

    Raises:
        TableError: several do.
    """
    line = section.lines[0]
    root = line.cell("root") if "root" in line.columns else None
    stated_ranks = None if stated_group is None else stated_group["num_ranks"]
    # An excerpt lists some of the ranks only: the last one says how many there are.
    if stated_ranks == len(section.ranks) <= section.highest_rank:
        stated_ranks = section.highest_rank + 1
    elif section.lacks_ranks:
        stated_ranks = None
    fitting = ratio.tests(line.cell("redop"), root, stated_ranks)
    if len(fitting) > 1:
        kinds = " or ".join(COLLECTIVES.get(test, test) for test in fitting)
        raise TableError(
            f"{place}: the log does not name the test; its bandwidths fit {kinds}; say which with --collective NAME"
        )
    return fitting[0] if fitting else ""


def checked_time_us(time_us: object, algbw: object, size: float, place: str) -> float:
    """The time, checked against the printed bandwidth (GB/s = bytes / us / 1000)."""
    time = number(time_us, "time", place, 0)
    bandwidth = number(algbw, "algbw", place, 0)
    if time == 0:
        raise TableError(f"{place}: the time is 0 us, because the timer did not run; measure again")
    # Two decimals of a bandwidth and few digits of a time: beyond this, a unit was converted on one
    # side alone.
    if abs(size / time / 1e3 - bandwidth) > 0.011 + 0.02 * bandwidth:
        raise TableError(
            f"{place}: {size:.0f} bytes in {time:g} us are {size / time / 1e3:.4g} GB/s, the algbw column says "
            f"{bandwidth:g}; are units mixed?"
        )
    return time


def collective_row(
    test: str, options: ReadOptions, place: str, size: float, dtype: str, skipped: Counter[str]
) -> Row | None:
    """The columns that identify the collective; none for a collective that tables do not have.

    Raises:
        TableError: a file that names no program where the user does not either, or another than the
            user.
    """
    if not test and not options.collective:
        raise TableError(
            f"{place}: the log does not name the collective; include the line with the command, or give "
            "--collective NAME"
        )
    stated = options.collective
    if test and stated and COLLECTIVES.get(test) != stated:
        raise TableError(
            f"{place}: this is the output of {test}_perf, not of {stated}; leave --collective out"
        )
    test = test or next(name for name, kind in COLLECTIVES.items() if kind == stated)
    if test not in COLLECTIVES:
        skipped[f"no such collective in the tables: {test}"] += 1
        return None
    # The first line of many runs has less than one element per rank.
    if size == 0:
        skipped["no bytes"] += 1
        return None
    if dtype not in DTYPES:
        skipped[f"no such element type in the tables: {dtype}"] += 1
        return None
    return {
        "source": "nccl-tests",
        "collective": COLLECTIVES[test],
        "bytes": int(size),
        "dtype": DTYPES[dtype],
    }


def group_columns(ranks: Sequence[ListedRank], options: ReadOptions, place: str) -> Row:
    """Columns of the device and of the group of a run, from the ranks that the file lists.

    Raises:
        TableError: ranks that nobody states, of different devices, or another number than the user
            says.
    """
    if not ranks and options.ranks is None:
        raise TableError(
            f"{place}: the file lists no ranks ('# Rank 0 ...'); say how many with --ranks N"
        )
    # A collective runs at the pace of its slowest device: a mixed group measures neither kind.
    names = {rank.device_name for rank in ranks}
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise TableError(
            f"{place}: the ranks are on different devices ({listed}); measure one kind at a time"
        )
    device = options.name_of(min(names, default=""))
    if not ranks:
        return {"device": device, "num_ranks": options.ranks} | options.nodes(options.ranks or 0)
    # Communicators that run side by side (NCCL_TESTS_SPLIT) are alike: one stands for all.
    group = Counter(rank.group for rank in ranks).most_common(1)[0][0]
    ranks_on_host = Counter(rank.host for rank in ranks if rank.group == group)
    count = sum(ranks_on_host.values())
    if options.ranks is not None and options.ranks != count:
        raise TableError(
            f"{place}: the file lists {count} ranks, not {options.ranks}; leave --ranks out"
        )
    nodes = {"num_nodes": len(ranks_on_host), "ranks_per_node": max(ranks_on_host.values())}
    return {"device": device, "num_ranks": count} | nodes | options.nodes(count)
