"""Predictions held against measurements."""

from perfmodel.validation._cases import validate_cases as validate_cases
from perfmodel.validation._kernels import validate_kernels as validate_kernels
from perfmodel.validation._live import LiveReport as LiveReport
from perfmodel.validation._live import LiveResult as LiveResult
from perfmodel.validation._live import LiveSettings as LiveSettings
from perfmodel.validation._live import validate_live as validate_live
from perfmodel.validation._live_cases import LiveCase as LiveCase
from perfmodel.validation._live_cases import live_cases as live_cases
from perfmodel.validation._live_report import live_report as live_report
from perfmodel.validation._schedule_tables import bubble_table as bubble_table
from perfmodel.validation._schedule_tables import memory_table as memory_table
from perfmodel.validation._schedule_tables import version_table as version_table
from perfmodel.validation._schedule_tables import vgg_table as vgg_table
from perfmodel.validation._schedule_tables import zero_bubble_table as zero_bubble_table
from perfmodel.validation._timeline_errors import TimelineErrors as TimelineErrors
from perfmodel.validation._timelines import compare_timelines as compare_timelines
from perfmodel.validation._trace_comparison import TraceComparison as TraceComparison
from perfmodel.validation._trace_comparison import compare_traces as compare_traces
from perfmodel.validation._trace_comparison import timeline_trace as timeline_trace
