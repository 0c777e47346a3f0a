"""The papers' statements about schedules, checked: writes validate/schedules.md.

python validate/schedules.py [--data DIR]
"""

import argparse
from pathlib import Path

import pandas as pd
from studies.schedule_tables import bubble_table, memory_table, zero_bubble_table
from studies.tables import frame_table

from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
FORMULAS = """\
The paper has (p - 1) / (m + p - 1) for GPipe and DAPPLE (`1f1b`), and for Chimera (p - 2) / (3m/2 + p - 2) where a
backward is twice a forward, and (p - 2) / (2m + p - 2) where they are equal. That of forward doubling follows from
section 3.5: a forward of two micro-batches lasts as long as a backward of one, so that a device has 3m/2 slots of work
and p - 2 idle ones.
"""


def main() -> None:
    """Write the page and print it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, help="folder of the shared measurement tables")
    data = arguments.parse_args().data
    text = "\n".join(section for section in sections(data))
    write_text(HERE / "schedules.md", text)
    print(text)


def sections(data: Path | None) -> list[str]:
    """Parts of the page; measured runs only where their tables are at hand."""
    parts = [
        "# Schedules against their papers\n\nWritten by `python validate/schedules.py --data DIR`.\n",
        "## Bubble fractions (Chimera, table 2 and sections 3.1, 3.5)\n",
        FORMULAS,
        frame_table(bubble_table(), ".4f"),
        "## Weights and activations per device, m = 2 p (Chimera, table 2)\n",
        frame_table(memory_table(), ".4f"),
    ]
    # Formulas need no data; without the folder the page has them alone.
    if data is not None:
        runs = zero_bubble_table(data / "published" / "zero_bubble.csv")
        by_schedule = runs.groupby("schedule")
        # Both errors, so that what the host's time explains can be seen.
        columns = {
            "rows": by_schedule.size(),
            "stated times alone": by_schedule.stated_only_error.apply(mean_abs),
            "with the host's time per transfer": by_schedule.error.apply(mean_abs),
            "memory GB": by_schedule.memory_gb.mean(),
        }
        parts += [
            "## Zero-bubble runs from the stage times that they state\n",
            f"{len(runs)} rows: mean absolute error {mean_abs(runs.stated_only_error):.1%} from the stated times "
            f"alone, {mean_abs(runs.error):.1%} with the host's time per transfer.\n",
            frame_table(pd.DataFrame(columns).reset_index(), ".4f"),
        ]
    return parts


def mean_abs(errors: pd.Series) -> float:
    """Mean absolute error."""
    return float(errors.abs().mean())


if __name__ == "__main__":
    main()
