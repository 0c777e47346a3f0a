"""Fit the shipped kernel weights:
`PERFMODEL_DATA=DIR python training/fit.py [RECIPE ...] [--out DIR]`.

About two hours on two cores for all recipes; stops and resumes at any time. Afterwards
`python training/baselines.py` and `python training/report.py` renew the report and cards.
"""

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from perfmodel.cost.learn.training import fit, read_recipe
from perfmodel.ingest import kernel_table_paths

HERE = Path(__file__).parent


def main() -> None:
    """Fit the named recipes, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "recipes", nargs="*", help="names of files in training/recipes; all by default"
    )
    parser.add_argument(
        "--data", default=os.environ.get("PERFMODEL_DATA"), help="folder with the public tables"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "perfmodel" / "cost" / "learn" / "weights"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the start and the order of rows (default 0)"
    )
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("name the folder of the tables with --data or PERFMODEL_DATA")
    paths = kernel_table_paths(arguments.data)
    names = arguments.recipes or [p.stem for p in sorted((HERE / "recipes").glob("*.toml"))]
    # On stderr, as figures are printed to stdout.
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        tasks = {}

        def progress(what: str, done: int, total: int) -> None:
            """Show how far a stage of training is."""
            # What follows the comma changes from step to step.
            stage = what.partition(",")[0]
            if stage not in tasks:
                tasks[stage] = bar.add_task(what, total=total)
            bar.update(tasks[stage], description=what, completed=done)

        for name in names:
            recipe = read_recipe(HERE / "recipes" / f"{name}.toml")
            # A recipe learns one family, whose tables begin with its name.
            tables = [p for p in paths if p.name.startswith(recipe.family)]
            figures = fit(
                tables,
                arguments.out,
                family=recipe.family,
                recipes=[recipe],
                seed=arguments.seed,
                progress=progress,
            )
            print(name, figures[name])


if __name__ == "__main__":
    main()
