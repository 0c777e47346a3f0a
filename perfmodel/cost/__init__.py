from perfmodel.cost._collectives import CollectiveModel as CollectiveModel
from perfmodel.cost._collectives import interconnect_of as interconnect_of
from perfmodel.cost._describe import calibration_files as calibration_files
from perfmodel.cost._describe import describe_calibration as describe_calibration
from perfmodel.cost._events import EventTimes as EventTimes
from perfmodel.cost._events import PricesCollectives as PricesCollectives
from perfmodel.cost._events import PricesKernels as PricesKernels
from perfmodel.cost._events import event_times as event_times
from perfmodel.cost._growth import growth as growth
from perfmodel.cost._growth import with_sizes as with_sizes
from perfmodel.cost._inference import inference_times as inference_times
from perfmodel.cost._kernels import KernelModel as KernelModel
from perfmodel.cost._power import TENSOR_TYPES as TENSOR_TYPES
from perfmodel.cost._power import has_power_law as has_power_law
from perfmodel.cost._power import sustained_seconds as sustained_seconds
from perfmodel.cost._power import under_load as under_load
from perfmodel.cost._roofline import measured_work as measured_work
from perfmodel.cost._roofline import roofline_seconds as roofline_seconds
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
