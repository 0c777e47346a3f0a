"""What pictures of a step need."""

from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction
from perfmodel.timeline import Timeline


def timeline_of(prediction: Prediction) -> Timeline:
    """The prediction's timeline.

    Raises:
        PerfModelError: it was made without `timeline=True`.
    """
    if prediction.timeline is None:
        raise PerfModelError("this prediction holds no timeline; call predict(..., timeline=True)")
    return prediction.timeline
