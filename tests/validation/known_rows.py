"""Every column of a table of published runs with the words that mean something else, kept in
`known_rows.csv`.

Words are those of the public tables and of the vocabularies, of which each is there once for what
it means. After a change that is meant to move what is read, they are looked for again (some
minutes) by

    PERFMODEL_DATA=... PYTHONPATH=tests:tests/validation python tests/validation/known_rows.py
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from stored_figures import Figures, StoredCase, read_cases, write_cases

from perfmodel.errors import PerfModelError
from perfmodel.spec import Job, Layout, Transformer, key_fields
from perfmodel.validation.rows import Case, Row, read_case, read_rows, rows_of
from perfmodel.validation.rows.vocabulary import (
    DTYPE,
    LAUNCH_SWITCHES,
    RECOMPUTE,
    SCHEDULE,
    SHARDING,
)

TABLE = Path(__file__).with_suffix(".csv")
DENSE: Row = {
    "case_id": "x",
    "source": "a table",
    "model": "m",
    "family": "llama",
    "layers": 48,
    "hidden": 6144,
    "heads": 64,
    "kv_heads": 8,
    "ffn_hidden": 16384,
    "vocab": 32000,
    "seq_len": 2048,
    "device": "A100-SXM4-80GB",
    "n_devices": 32,
    "devices_per_node": 8,
    "intra_link": "NVLink3/NVSwitch",
    "inter_link": "8x HDR 200 Gbps InfiniBand per node",
    "dtype": "bf16",
    "tp": 2,
    "pp": 4,
    "dp": 4,
    "micro_batch": 2,
    "global_batch": 64,
    "measured_iter_time_s": 1.42,
    "status": "ok",
}
EXPERTS: Row = {
    **DENSE,
    "family": "moe",
    "model": "e",
    "n_experts": 8,
    "top_k": 2,
    "ep": 4,
    "pp": 1,
    "dp": 16,
    "sequence_parallel": 1,
    "device": "H100-SXM5-80GB",
    "framework": "nemo@2025",
}
BASES: Mapping[str, Row] = {
    "dense": DENSE,
    "megatron": {
        **DENSE,
        "framework": "megatron-lm@2022",
        "vpp": 2,
        "zero_stage": 1,
        "recompute": "selective",
    },
    "fsdp": {**DENSE, "framework": "fsdp", "tp": 1, "pp": 1, "dp": 32, "zero_stage": 3},
    "maxtext": {
        **DENSE,
        "framework": "maxtext@2024",
        "device": "TPU-v5e",
        "intra_link": None,
        "inter_link": None,
        "tp": 1,
        "pp": 1,
        "dp": 32,
    },
    "deepspeed": {
        **DENSE,
        "framework": "deepspeed",
        "tp": 1,
        "pp": 1,
        "dp": 32,
        "zero_stage": 2,
        "dtype": "fp16",
    },
    "experts": EXPERTS,
    "of the catalog": {
        name: cell
        for name, cell in {
            **DENSE,
            "model": "llama2-70B",
            "job.frozen": 1,
            "job.adapter_rank": 16,
        }.items()
        if name not in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    },
}
MEASURED = (
    "measured",
    "check",
    "n_runs",
    "time_run",
    "memory_",
    "flops_",
    "contradictions",
    "year",
    "framework_as",
    "inter_link_as",
    "url",
    "source",
    "case_id",
    "notes",
    "status",
    "layout_source",
)
"""Beginnings of the names of columns that do not say what ran."""


NAMED = ("name", "source", "aliases")
"""Fields of a model that are no sizes."""


def facts(case: Case) -> dict[str, float]:
    """All that a row says: numbers but 0 by their names, and each word as a name that counts
    one."""
    # Of framework and cluster what the row chooses: their other figures are the catalog's.
    network = [
        (level.name, level.bandwidth_bytes_per_s, level.latency_s) for level in case.cluster.levels
    ]
    values: dict[str, Any] = {
        "framework": case.framework.label,
        "job": replace(case.job, assumed=()),
        "layout": case.layout,
    }
    values |= {
        "device": case.cluster.device.name,
        "per_node": case.cluster.devices_per_node,
        "network": network,
    }
    values |= {
        "stated": dict.fromkeys(case.stated, True),
        "assumed": dict.fromkeys(case.assumed, True),
    }
    values["contradictions"] = len(case.contradictions)
    if isinstance(case.model, Transformer):
        values["model"] = {
            key: size for key, size in case.model.values().items() if key not in NAMED
        }
    return {
        name: number
        for key, value in values.items()
        for name, number in _numbers(key, value)
        if number
    }


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A value as figures: itself, its entries and fields, or a name that counts one."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(f"{name}.{key}", entry)
    elif isinstance(value, tuple | list):
        for place, entry in enumerate(value):
            yield from _numbers(f"{name}.{place}", entry)
    elif isinstance(value, bool | int | float):
        yield "".join(name.split()).replace("=", ":"), float(value)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _numbers(name, {key: getattr(value, key) for key in value.__dataclass_fields__})
    elif value:
        yield "".join(f"{name}.{value}".split()).replace("=", ":")[:80], 1.0


def read(row: Row) -> Figures:
    """Reading of a row, as figures."""
    try:
        return facts(read_case(row))
    except PerfModelError as error:
        return {f"refused.{type(error).__name__}": 1.0}


def cases() -> Iterator[StoredCase]:
    """Readings, by the present code, of every row of the table."""
    for case in read_cases(TABLE):
        row = BASES[case.base.removeprefix(REFUSED)]
        change = {} if case.name == case.base else json.loads(case.name)
        yield StoredCase(case.base, case.name, read({**row, **change}))


# --- looking for words
# --------------------------------------------------------------------------------

MOST_NUMBERS = 2
"""Most numbers of one column: what is read of one says what is read of all."""
REFUSED = "refused: "
"""Before the name of a base whose change is refused: such a row has no figures of it."""


def looked_for() -> Iterator[StoredCase]:
    """Every base with the cells of every column that read otherwise than others."""
    cells = cells_of_columns(Path(os.environ["PERFMODEL_DATA"]) / "published")
    for column, words in (*words_of_columns(), *values_of_keys()):
        cells[column] = [*cells.get(column, []), *words]
    told: set[str] = set()
    for base, row in BASES.items():
        plain = read(row)
        yield StoredCase(base, base, plain)
        for column, values in cells.items():
            seen = [plain]
            numbers = 0
            for value in (None, *values):
                is_number = isinstance(value, int | float)
                if is_number and numbers == MOST_NUMBERS:
                    continue
                figures = read({**row, column: value})
                if figures in seen:
                    continue
                seen.append(figures)
                numbers += is_number
                is_refused = any(name.startswith("refused") for name in figures)
                text = json.dumps({column: value})
                what = f"{text} {'refused' if is_refused else _changes(plain, figures)}"
                if what not in told:
                    told.add(what)
                    yield StoredCase(f"{REFUSED}{base}" if is_refused else base, text, figures)


def _changes(plain: Figures, figures: Figures) -> list[tuple[str, float | None]]:
    names = plain.keys() | figures.keys()
    return sorted(
        (name, figures.get(name)) for name in names if plain.get(name) != figures.get(name)
    )


def cells_of_columns(folder: Path) -> dict[str, list[Any]]:
    """All cells of the public tables that say what ran, the shortest first."""
    cells: dict[str, set[Any]] = {}
    for file in sorted(folder.rglob("*.csv")):
        table = read_rows(file)
        if not {"tp", "n_devices"} <= set(table.columns):
            continue
        for row in rows_of(table):
            for column, value in row.items():
                if value is not None and not column.startswith(MEASURED) and len(str(value)) <= 120:
                    cells.setdefault(column, set()).add(value)
    return {
        column: sorted(values, key=lambda cell: (len(str(cell)), str(cell)))
        for column, values in cells.items()
    }


def words_of_columns() -> Iterator[tuple[str, list[Any]]]:
    """Examples of every phrase that a column of words knows, and every switch of a launch."""
    for phrases, columns in (
        (DTYPE, ("dtype", "dtype_recipe")),
        (RECOMPUTE, ("recompute", "recompute_detail")),
        (SHARDING, ("sharding",)),
        (SCHEDULE, ("schedule",)),
    ):
        words = [word.strip() for phrase in phrases for word in examples(phrase.pattern)]
        for column in columns:
            yield column, list(dict.fromkeys(words))
    yield "launch_and_overlap", [f"{name}={value}" for name in LAUNCH_SWITCHES for value in (1, 0)]


def values_of_keys() -> Iterator[tuple[str, list[Any]]]:
    """Other values of every key of a layout and a job that is a switch or a whole number."""
    for table, record in (("layout", Layout), ("job", Job)):
        for name, key in key_fields(record).items():
            if key.hint in (bool, int):
                yield f"{table}.{name}", [1, 0] if key.hint is bool else [2, 4]


def examples(pattern: str) -> list[str]:
    """Texts that match a regular expression: each alternative of every part once."""
    return _examples_of_parts(_parser.parse(pattern))


def _examples_of_parts(parts: Any) -> list[str]:
    choices = [_examples_of_part(*part) for part in parts]
    usual = [choice[0] for choice in choices]
    texts = ["".join(usual)]
    for place, choice in enumerate(choices):
        for other in choice[1:]:
            texts.append("".join([*usual[:place], other, *usual[place + 1 :]]))
    return texts


def _examples_of_part(kind: Any, argument: Any) -> list[str]:
    match str(kind):
        case "LITERAL":
            return [chr(argument)]
        case "BRANCH":
            return [text for branch in argument[1] for text in _examples_of_parts(branch)]
        case "SUBPATTERN":
            return _examples_of_parts(argument[-1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            return (
                ["", *_examples_of_parts(argument[2])]
                if argument[0] == 0
                else _examples_of_parts(argument[2])
            )
        case "IN":
            return _examples_of_part(*argument[0])
        case "CATEGORY":
            return ["4"] if "DIGIT" in str(argument) else ["x"]
        case "RANGE":
            return [
                chr(number) for number in range(argument[0], min(argument[1], argument[0] + 4) + 1)
            ]
        case _:
            return [""]


if __name__ == "__main__":
    write_cases(TABLE, looked_for())
