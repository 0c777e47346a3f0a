"""Files of benchmarks and profilers as measurement tables and as timelines of devices."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest._chrome import chrome_trace as chrome_trace
from perfmodel.ingest._chrome import complete_event as complete_event
from perfmodel.ingest._chrome import name_event as name_event
from perfmodel.ingest._chrome import write_chrome as write_chrome
from perfmodel.ingest._collective_tables import clean_collectives as clean_collectives
from perfmodel.ingest._collective_tables import published_collectives as published_collectives
from perfmodel.ingest._kernel_tables import OWN_ORDER as OWN_ORDER
from perfmodel.ingest._kernel_tables import SERVER_KERNELS as SERVER_KERNELS
from perfmodel.ingest._kernel_tables import clean_kernels as clean_kernels
from perfmodel.ingest._kernel_tables import fills_caches as fills_caches
from perfmodel.ingest._kernel_tables import held_under_load as held_under_load
from perfmodel.ingest._kernel_tables import kernel_table_paths as kernel_table_paths
from perfmodel.ingest._kernel_tables import quantises_operands as quantises_operands
from perfmodel.ingest._measured_trace import PHASES as PHASES
from perfmodel.ingest._measured_trace import Activity as Activity
from perfmodel.ingest._measured_trace import ActivityKind as ActivityKind
from perfmodel.ingest._measured_trace import MeasuredTrace as MeasuredTrace
from perfmodel.ingest._measured_trace import trace_of as trace_of
from perfmodel.ingest._options import ReadOptions as ReadOptions
from perfmodel.ingest._own import write_measured_trace as write_measured_trace
from perfmodel.ingest._profile import Call as Call
from perfmodel.ingest._profile import Profile as Profile
from perfmodel.ingest._read import FORMATS as FORMATS
from perfmodel.ingest._read import TABLE_FORMATS as TABLE_FORMATS
from perfmodel.ingest._read import TRACE_FORMATS as TRACE_FORMATS
from perfmodel.ingest._read import detect_format as detect_format
from perfmodel.ingest._read import import_measurements as import_measurements
from perfmodel.ingest._read import read_measurements as read_measurements
from perfmodel.ingest._read import read_profile as read_profile
from perfmodel.ingest._read import read_trace as read_trace
from perfmodel.ingest._rows import Measurements as Measurements

shorten_reprs(__name__)
