"""Reader of the file that nccl-tests writes with `-J FILE` (versions 1 and 2)."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, listing, mapping, number, text
from perfmodel.ingest._nccl_settings import algorithm, allowed, nccl_version, variant
from perfmodel.ingest._nccl_tests import (
    ListedRank,
    checked_time_us,
    collective_row,
    group_columns,
    test_of,
)
from perfmodel.ingest._rows import ReadOptions, Row

_VERSIONS: Final = (1, 2)
_MOST_RANKS: Final = 10**6


def read_nccl_json(
    path: Path, data: Mapping[str, Any], options: ReadOptions, skipped: Counter[str]
) -> list[Row]:
    """Rows of the file; of its environment block, only variables on the allow-list are kept.

    Raises:
        TableError: another file version, a run that did not finish, wrong values, or impossible
            records.
    """
    _require_finished_run(path, data)
    command = [
        text(argument, "args", path) for argument in listing(data.get("args", []), "args", path)
    ]
    test = test_of(Path(command[0]).name) if command else ""
    settings = allowed(text(e, "env", path) for e in listing(data.get("env", []), "env", path))
    config = mapping(data.get("config"), "config", path)
    group = group_columns(_ranks(path, config), options, str(path))
    code = data.get("nccl_version")
    software = "nccl-tests"
    if code is not None:
        software = f"nccl-{nccl_version(integer(code, 'nccl_version', path))}"
    common: Row = group | {
        "algorithm": algorithm(settings),
        "software": software,
    }
    rows: list[Row] = []
    for index, item in enumerate(listing(data.get("results"), "results", path)):
        place = f"{path}: result {index}"
        result = mapping(item, "result", place)
        iterations = result.get("actual_iterations", config.get("iterations", 1))
        for layout in ("out_of_place", "in_place"):
            if result.get(layout) is None:
                continue
            row = _row(
                test or test_of(str(result.get("experiment_name", ""))),
                options,
                result,
                layout,
                place,
                skipped,
            )
            if row is not None:
                # Version 2 states the iterations that really ran, which differ from those asked
                # for.
                row.setdefault("n_repeats", integer(iterations, "iterations", place, 1))
                rows.append(row | common | {"variant": variant(layout, settings)})
    if not rows and not skipped:
        raise TableError(f"{path}: the file has no results; run the test again")
    return rows


def _require_finished_run(path: Path, data: Mapping[str, Any]) -> None:
    """Raise `TableError` unless the file has a known version and a run that ended without wrong
    values."""
    version = data.get("version")
    if version not in _VERSIONS:
        raise TableError(
            f"{path}: this is version {version!r} of nccl-tests' JSON, and perfmodel reads {_VERSIONS}; write "
            "the file in one of these"
        )
    if "out_of_bounds" not in data:
        raise TableError(
            f"{path}: the run was cut short, because the file has no out_of_bounds; run it again"
        )
    checked = mapping(data["out_of_bounds"], "out_of_bounds", path)
    wrong = number(checked.get("count"), "out_of_bounds count", path)
    if wrong != 0:
        raise TableError(f"{path}: the run computed {wrong:g} wrong values; run the test again")


def _ranks(path: Path, config: Mapping[str, Any]) -> list[ListedRank]:
    """All ranks of the run, process by process."""
    threads = integer(config.get("nthreads", 1), "nthreads", path, 1)
    gpus = integer(config.get("ngpus", 1), "ngpus", path, 1)
    # The file lists the first rank of every process; the others of the process are like it.
    first_ranks: list[ListedRank] = []
    for item in listing(config.get("devices"), "devices", path):
        process = mapping(item, "devices", path)
        host = text(process.get("hostname", ""), "hostname", path)
        device = text(process.get("device_info", ""), "info", path)
        first_ranks.append(ListedRank(str(process.get("group", 0)), host, device))
    # A damaged number of threads would make a list of billions of ranks.
    if threads * gpus * len(first_ranks) > _MOST_RANKS:
        raise TableError(
            f"{path}: {threads} threads of {gpus} GPUs contradict {len(first_ranks)} processes; correct the config"
        )
    ranks: list[ListedRank] = []
    for rank in first_ranks:
        ranks += [rank] * (threads * gpus)
    return ranks


def _row(
    test: str,
    options: ReadOptions,
    result: Mapping[str, Any],
    layout: str,
    place: str,
    skipped: Counter[str],
) -> Row | None:
    """The table's row for one timing of a message size; None if it is not the collective's."""
    timing = mapping(result[layout], layout, place)
    if "time" not in timing:
        skipped["time of the CPU (nccl-tests -C), not of the collective"] += 1
        return None
    if timing.get("nwrong") is not None and number(timing["nwrong"], "nwrong", place) != 0:
        raise TableError(
            f"{place}: the run computed {timing['nwrong']} wrong values {layout}; run the test again"
        )
    size = number(result.get("size"), "size", place, 0)
    time_us = checked_time_us(timing["time"], timing.get("alg_bw"), size, place)
    row = collective_row(
        test, options, place, size, text(result.get("type"), "type", place), skipped
    )
    if row is None:
        return None
    row["time_us"] = time_us
    iterations = result.get(f"{layout}_per_iter")
    if iterations:
        # Medians of single iterations are free of the slow first ones that the mean above holds.
        per_iteration = mapping(iterations, f"{layout}_per_iter", place)
        times_us = listing(per_iteration.get("times_us"), "times_us", place)
        row |= {
            "time_us": number(per_iteration.get("p50_us"), "p50_us", place, 1e-9),
            "time_us_std": number(per_iteration.get("stdev_us"), "stdev_us", place, 0),
            "n_repeats": max(len(times_us), 1),
        }
    return row
