"""Files of benchmarks and profilers as measurement tables and as timelines of devices."""

from perfmodel.display import shorten_reprs
from perfmodel.readers._collective_tables import clean_collectives as clean_collectives
from perfmodel.readers._kernel_tables import OWN_ORDER as OWN_ORDER
from perfmodel.readers._kernel_tables import clean_kernels as clean_kernels
from perfmodel.readers._kernel_tables import kernel_table_paths as kernel_table_paths
from perfmodel.readers._kernel_tables import stand_in_order as stand_in_order
from perfmodel.readers._kernel_tables import times_host_launch as times_host_launch
from perfmodel.readers._measured_trace import PHASES as PHASES
from perfmodel.readers._measured_trace import Activity as Activity
from perfmodel.readers._measured_trace import ActivityKind as ActivityKind
from perfmodel.readers._measured_trace import MeasuredTrace as MeasuredTrace
from perfmodel.readers._measured_trace import trace_of as trace_of
from perfmodel.readers._options import ReadOptions as ReadOptions
from perfmodel.readers._own import write_measured_trace as write_measured_trace
from perfmodel.readers._read import FORMATS as FORMATS
from perfmodel.readers._read import TABLE_FORMATS as TABLE_FORMATS
from perfmodel.readers._read import TRACE_FORMATS as TRACE_FORMATS
from perfmodel.readers._read import detect_format as detect_format
from perfmodel.readers._read import import_measurements as import_measurements
from perfmodel.readers._read import read_measurements as read_measurements
from perfmodel.readers._read import read_trace as read_trace
from perfmodel.readers._rows import Measurements as Measurements

shorten_reprs(__name__)
