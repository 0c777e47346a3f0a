"""The constants of an unknown site that predictions take, fitted to the published runs:
`perfmodel fit --sites`.

python validate/fit_sites.py --data DIR

Reads every collection of DIR (folders `published*`) and writes sustained.json, memory.json,
population.json and its card population.md of perfmodel/prediction/sites; with numpyro (extra
`sampler`) the card compares the posterior with a sampler's. Run it again after anything that moves
predicted times or memory; it takes some ten minutes on one core.
"""

import argparse
import os

# The fit solves many small equations. BLAS's threads then mostly wait for one another, and while
# they wait they spin: with another program on the machine the fit takes several times as long.
# NumPy reads this when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from prepared_runs import prepared
from studies.blind_record import WITHOUT_A_LOOK, collections
from studies.facts_in_view import FactsInView

from perfmodel.validation import fit_sites
from perfmodel.validation.rows import read_tables

OUT = Path(__file__).parents[1] / "perfmodel" / "prediction" / "sites"
UNSTATED = (
    "NVIDIA",
    "NeMo",
    "OneFlow DLPerf v1.0",
    "MaxText",
    "AI-Hypercomputer",
    "tpu-recipes",
    "Lambda",
    # people who complain, and single kernels timed in a step: what holds them back is not the clock
    "ROCm TransformerEngine issues",
    "Megatron-LM issues",
    "llm-foundry issue",
    "nanoGPT threads",
    "torchao",
)
"""Beginnings of names of sources that say nothing of products under load: their tables leave
recompute or the kernels to recipes, their device was never measured, or something else holds them
back."""


def main() -> None:
    """Fit the constants of sites, write them with their card, and print the card."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    data = arguments.parse_args().data
    more = None
    if find_spec("numpyro"):
        from studies.sampler import of_fit as more
    else:
        print(
            "numpyro is not installed (extra `sampler`): the card has no comparison with a sampler"
        )

    # Results of the first collection were in view when facts of frameworks were looked up. For its
    # sources these are undone, so that intervals are fitted to honest errors.
    first, _ = read_tables(sorted((data / WITHOUT_A_LOOK).glob("*.csv")))
    in_view = FactsInView(set(first["source"]))
    files: list[Path] = []
    for folder in (data / WITHOUT_A_LOOK, *collections(data)):
        files += sorted(folder.glob("*.csv"))
    with TemporaryDirectory() as into:
        fit_sites(
            prepared(files, Path(into)),
            OUT,
            unstated=UNSTATED,
            undo=in_view.undo,
            looked_at=in_view.looked_at,
            more=more,
        )
    print((OUT / "population.md").read_text())


if __name__ == "__main__":
    main()
