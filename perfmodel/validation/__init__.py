"""Predictions held against measurements."""

from perfmodel.display import shorten_reprs
from perfmodel.validation._calibration_page import CalibrationReport as CalibrationReport
from perfmodel.validation._calibration_page import calibration_report as calibration_report
from perfmodel.validation._case_rows import Case as Case
from perfmodel.validation._case_rows import read_case as read_case
from perfmodel.validation._cases import cases_report as cases_report
from perfmodel.validation._cases import measured_times_s as measured_times_s
from perfmodel.validation._cases import memory_bytes as memory_bytes
from perfmodel.validation._cases import predict_cases as predict_cases
from perfmodel.validation._cases import read_rows as read_rows
from perfmodel.validation._cases import read_tables as read_tables
from perfmodel.validation._cases import validate_cases as validate_cases
from perfmodel.validation._kernels import validate_kernels as validate_kernels
from perfmodel.validation._parity import parity_rows as parity_rows
from perfmodel.validation._report import ValidationReport as ValidationReport
from perfmodel.validation._report import errors as errors
from perfmodel.validation._report import fit_figures as fit_figures
from perfmodel.validation._residuals import CaseResidual as CaseResidual
from perfmodel.validation._residuals import explain_case as explain_case
from perfmodel.validation._residuals import explain_cases as explain_cases
from perfmodel.validation._runs import read_runs as read_runs
from perfmodel.validation._site_fit import fit_sites as fit_sites
from perfmodel.validation._term_errors import EVERY_TERM as EVERY_TERM
from perfmodel.validation._term_errors import MOST_ROWS as MOST_TERM_ROWS
from perfmodel.validation._term_errors import term_errors as term_errors
from perfmodel.validation._timeline_errors import TimelineErrors as TimelineErrors
from perfmodel.validation._timeline_errors import compare_timelines as compare_timelines
from perfmodel.validation._trace_comparison import TraceComparison as TraceComparison
from perfmodel.validation._trace_comparison import compare_traces as compare_traces
from perfmodel.validation._trace_comparison import timeline_trace as timeline_trace

shorten_reprs(__name__)
