"""Write `perfmodel/planning/layouts/sobol.npy`: the direction numbers of SciPy's scrambled Sobol
sequences.

A search draws the same joint errors every time. SciPy makes such draws too, but to import
`scipy.stats` takes longer than to price a thousand layouts. `tests/planning/layouts/test_robust.py`
holds both to be equal.
"""

from pathlib import Path

import numpy as np
from jaxtyping import UInt32
from scipy.stats import qmc

from perfmodel.planning.layouts._robust import DRAWS, MOST_STORED, RESOLUTION, SOBOL_FILE

OUT = Path(__file__).parents[1] / "perfmodel" / "planning" / "layouts" / SOBOL_FILE


def direction_numbers(dimensions: int) -> UInt32[np.ndarray, "dimensions numbers"]:
    """The first point of a sequence, then the number by which every bit of a point's index changes
    the point."""
    points = qmc.Sobol(dimensions, rng=np.random.default_rng(0)).random(DRAWS)
    integers = (points.T / RESOLUTION).astype(np.uint32)
    # The point at index 2^k differs from the one before by the direction number of bit k.
    powers = 2 ** np.arange(DRAWS.bit_length() - 1)
    return np.column_stack([integers[:, 0], integers[:, powers] ^ integers[:, powers - 1]])


def main() -> None:
    """Write the numbers of all sequences that are stored, one after another."""
    table = np.concatenate(
        [direction_numbers(dimensions) for dimensions in range(1, MOST_STORED + 1)]
    )
    np.save(OUT, table)
    print(f"wrote {OUT}: {len(table)} rows")


if __name__ == "__main__":
    main()
