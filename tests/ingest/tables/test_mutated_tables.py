"""Whatever is wrong in a table: sound numbers, or one line that names file, column and row."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mutations import DROPPED, VALUES, refusal

from perfmodel.emulate import PriceTable
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import read_table
from perfmodel.validation.rows import read_tables

KERNELS = {
    "source": "s",
    "device": "A100",
    "op_family": "gemm",
    "op": "linear",
    "dtype": "bf16",
    "m": 128,
    "n": 256,
    "k": 64,
    "batch": 1,
    "pass": "fwd",
    "time_us": 12.5,
    "n_repeats": 10,
}
COLLECTIVES = {
    "device": "A100",
    "collective": "all_reduce",
    "num_ranks": 8,
    "ranks_per_node": 8,
    "bytes": 1024,
    "dtype": "bf16",
    "time_us": 20.0,
}
PRICES = {"collective": "all_reduce", "ranks": 4, "bytes": 1024, "time_s": 1e-4, "core_s": 1e-5}
RUNS = {
    "case_id": "a",
    "source": "s",
    "device": "A100",
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "micro_batch": 1,
    "measured_iter_time_s": 1.0,
}
READERS = {
    "kernels": (KERNELS, read_table),
    "collectives": (COLLECTIVES, read_table),
    "prices": (PRICES, PriceTable.read),
    "runs": (RUNS, lambda path: read_tables([path])),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_mutated_table_is_sound_or_refused(kind: str, tmp_path: Path):
    row, read = READERS[kind]
    path = tmp_path / "table.csv"
    for column in row:
        for value in VALUES:
            table = pd.DataFrame([row, row, row]).astype(object)
            if value is DROPPED:
                table = table.drop(columns=column)
            else:
                table.loc[1, column] = str(value) if isinstance(value, list | dict) else value
            table.to_csv(path, index=False)
            _require_sound(path, read, f"{column} -> {value!r}")


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\x00\x01\x02",
        b"\xff\xfe\xfa",
        b'"',
        b"a,b\n1",
        b"a,a\n1,2\n",
        b"PAR1",
        b'{"a": 1}',
        b"a;b\n1;2\n",
    ],
)
def test_what_is_no_table_is_refused(kind: str, content: bytes, tmp_path: Path):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(PerfModelError) as refused:
        READERS[kind][1](path)
    refusal(refused.value, repr(content))


def _require_sound(path: Path, read, what: str) -> None:
    try:
        found = read(path)
    except PerfModelError as error:
        refusal(error, what)
        return
    if isinstance(found, pd.DataFrame):
        assert np.isfinite(found["time_us"]).all(), what
        assert (found["time_us"] > 0).all(), what
