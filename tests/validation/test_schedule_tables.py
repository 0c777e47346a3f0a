"""The tables of validate/schedules.md."""

import pytest
from studies.schedule_tables import bubble_table, memory_table, version_table, zero_bubble_table

from perfmodel.schedule import schedule_facts


def test_bubbles_equal_their_formulas() -> None:
    table = bubble_table()
    assert len(table) == 20
    for row in table.itertuples():
        assert row.bubble == pytest.approx(row.formula, rel=1e-12)


def test_memory_rows_of_chimera_table_2() -> None:
    table = memory_table((8,)).set_index("schedule")
    assert table["weights / M"].to_dict() == {
        "pipedream": "1 to 8",
        "pipedream-2bw": "2",
        "gpipe": "1",
        "gems": "2",
        "1f1b": "1",
        "chimera": "2",
    }
    assert table["activations / Ma"].to_dict() == {
        "pipedream": "1 to 8",
        "pipedream-2bw": "1 to 8",
        "gpipe": "16",
        "gems": "1",
        "1f1b": "1 to 8",
        "chimera": "5 to 8",
    }


def test_version_differences() -> None:
    table = version_table(range(2, 9), range(2, 5))
    assert (table.simulated == table.closed_form).all()
    assert tuple(table[table.simulated != table.paper].iloc[0][:4]) == (6, 2, 2, 3)


@pytest.mark.shared
def test_zero_bubble_runs(data_dir) -> None:
    table = zero_bubble_table(data_dir / "published" / "zero_bubble.csv")
    assert len(table) == 24
    assert table.error.abs().mean() < 0.03
    measured = table.groupby("schedule").memory_gb.mean()
    ours = {
        "1F1B": schedule_facts("1f1b", 8, 24),
        "ZB-1p": schedule_facts("zb-h1", 8, 24),
        "1F1B-I": schedule_facts("interleaved", 8, 24, chunks=3),
        "ZB-2p": schedule_facts("zb-h2", 8, 24),
    }
    assert measured.sort_values().index.tolist() == sorted(
        ours, key=lambda name: ours[name].activations[1]
    )
