"""A prediction's timeline as one interactive HTML file."""

from pathlib import Path

from perfmodel.ingest.tables import write_text
from perfmodel.prediction import Prediction


def interactive(prediction: Prediction) -> str:
    """The page: zoom down to the kernels of a pass, move, search, what is under the pointer, the critical path, and
    memory below.

    Raises:
        PerfModelError: the prediction holds no timeline.
    """
    title = (
        f"{prediction.model} on {prediction.devices} devices of {prediction.cluster}, {prediction.layout}: "
        f"step {prediction.step_time_s:.4g} s, bubble {prediction.bubble_fraction:.1%}, MFU {prediction.mfu:.1%}"
    )
    timeline = prediction.kept_timeline
    return timeline.to_html(
        prediction.memory_over_time(), prediction.memory_capacity_bytes, title, prediction.pass_parts
    )


def write_interactive(prediction: Prediction, path: Path | str) -> None:
    """Write the page, which opens in any browser without a network."""
    write_text(path, interactive(prediction))
