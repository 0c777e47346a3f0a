"""What is uncertain of a step time, by source: layouts share most sources, and what they share cancels between them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._discrepancy import Discrepancy
from perfmodel.prediction._prediction import Prediction
from perfmodel.prediction._step_model import StepModel

OWN = "own"
"""Source that no two layouts share: the noise between one run and another."""


def log_covariance(fixed: StepModel, predictions: Sequence[Prediction]) -> Float[np.ndarray, "layouts layouts"]:
    """Covariance of the logarithms of the step times of some layouts of one step model.

    Sum over sources of sd_i sd_j, as `Prediction.error_sources` has them (errors of an op family, of a fitted parameter
    and of the framework are common to all layouts, in proportion to what each spends there), the runs' own noise on
    the diagonal, and the posterior covariance of the discrepancy between runs and model where measured runs are
    known.
    """
    names = sorted({name for p in predictions for name in p.error_sources if name != OWN})
    shared = np.array([[p.error_sources.get(name, 0.0) for name in names] for p in predictions])
    own = np.array([p.error_sources.get(OWN, 0.0) for p in predictions])
    found = shared.reshape(len(predictions), -1) @ shared.reshape(len(predictions), -1).T + np.diag(own**2)
    discrepancy: Discrepancy | None = fixed.adjustment.discrepancy if fixed.adjustment else None
    if discrepancy is not None and predictions:
        found += discrepancy.joint([fixed.coordinates(p.layout) for p in predictions])
    return found
