"""Cost models: seconds of kernels and collectives, each with its 90 % interval and provenance.

Beside this door is `perfmodel.cost.learn`, the regressors behind these times and their training.
"""

from perfmodel.cost._collectives import CollectiveModel, interconnect_of, share_of_link
from perfmodel.cost._events import (
    EventTimes,
    MonotoneGrid,
    PricesCollectives,
    PricesKernels,
    event_times,
    growing,
)
from perfmodel.cost._inference import inference_times
from perfmodel.cost._kernels import KernelModel
from perfmodel.cost._roofline import (
    TENSOR_TYPES,
    has_power_law,
    measured_work,
    roofline_seconds,
    slowed_unit_seconds,
    sustained_seconds,
    sustained_share,
    under_load,
)
from perfmodel.cost.learn import calibration_files, describe_calibration
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
