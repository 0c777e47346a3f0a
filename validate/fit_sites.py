"""The constants of an unknown site that predictions take, fitted to the published runs: `perfmodel fit --sites`.

python validate/fit_sites.py --data DIR [--skew]

Writes sustained.json, memory.json, population.json and its card population.md of perfmodel/prediction; with numpyro
(extra `sampler`) the card compares the posterior with a sampler's. Run it again after anything that moves predicted
times or memory.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from perfmodel.validation import fit_sites

OUT = Path(__file__).parents[1] / "perfmodel" / "prediction"
UNSTATED = ("NVIDIA", "NeMo", "OneFlow DLPerf v1.0", "MaxText")
"""Sources whose tables leave recompute or the kernels to recipes, or whose device was never measured."""

if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--skew", action="store_true", help="fit how far apart ranks reach collectives anew too")
    given = arguments.parse_args()
    more = None
    if find_spec("numpyro"):
        from studies.sampler import of_fit as more
    else:
        print("numpyro is not installed (extra `sampler`): the card has no comparison with a sampler")
    fit_sites(sorted((given.data / "published").glob("*.csv")), OUT, unstated=UNSTATED, skew=given.skew, more=more)
    print((OUT / "population.md").read_text())
