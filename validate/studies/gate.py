"""The gate: no family of kernels and no source of runs may become less accurate than the committed report."""

from collections.abc import Iterator
from typing import Any

TOLERANCE = 0.005
"""Growth of an error, a fraction of the measured value, that is let pass."""
RELATIVE = 0.05
"""The same, relative to the error before."""


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What became less accurate, in words; both as `validate/report.json` holds them.

    Compared are the mean error of every source's step times and of its memory, and of every kernel family and
    collective, on the same rows: a source or family whose rows have changed in number is named too.
    """
    told = []
    old, new = dict(_figures(before)), dict(_figures(after))
    for name, (n, error) in old.items():
        if name not in new:
            told.append(f"{name}: no longer predicted ({n} rows before)")
        elif new[name][0] < n:
            told.append(f"{name}: {new[name][0]} rows predicted, {n} before")
        elif new[name][1] > error + max(TOLERANCE, RELATIVE * error):
            told.append(f"{name}: mean error {new[name][1]:.1%}, {error:.1%} before")
    return told


def _figures(report: dict[str, Any]) -> Iterator[tuple[str, tuple[int, float]]]:
    """(what, (rows, mean error))."""
    for source, figures in report["cases"]["sources"].items():
        for what, of in (("step time", figures), ("peak memory", figures["memory"])):
            if of["n"]:
                yield f"{source}, {what}", (of["n"], of["mean_ape"])
    for family, devices in report["kernels"].get("families", {}).items():
        yield f"kernels, {family}", (devices["all"]["n"], devices["all"]["mean_ape"])
