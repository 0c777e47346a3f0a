"""Error figures of a set of predictions."""

from typing import Any

import numpy as np
from jaxtyping import Float64

from perfmodel.learn._tables import Samples


def absolute_percent(error: Float64[np.ndarray, "n"]) -> np.ndarray:
    """Absolute percentage errors from log(true / predicted)."""
    return 100.0 * np.abs(np.expm1(-error))


def summary(samples: Samples, index: np.ndarray, error: np.ndarray) -> dict[str, Any]:
    """Mean, median and 90th percentile of absolute percentage errors, in all and by dtype, device and source."""
    devices = np.array([s.figures.name for s in samples.stacks], object)[samples.stack[index]]
    sources = np.array([s.source for s in samples.stacks], object)[samples.stack[index]]
    dtypes = samples.dtypes[index]

    def by(labels: np.ndarray) -> dict[str, dict[str, float]]:
        return {str(v): figures_of_errors(error[labels == v]) for v in sorted(set(labels.tolist()))}

    return {**figures_of_errors(error), "by_dtype": by(dtypes), "by_device": by(devices), "by_source": by(sources)}


def figures_of_errors(error: Float64[np.ndarray, "n"]) -> dict[str, float]:
    """Count, mean, median and 90th percentile of the absolute percentage error, and the bias in per cent."""
    if not len(error):
        return {"n": 0}
    ape = absolute_percent(error)
    return {
        "n": len(ape),
        "mean_ape": round(float(ape.mean()), 2),
        "median_ape": round(float(np.median(ape)), 2),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 2),
        "bias": round(float(100 * np.expm1(-np.mean(error))), 2),
    }
