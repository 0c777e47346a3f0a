"""Compares predictions with measurements."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.validation._calibration_page import CalibrationReport, calibration_report
    from perfmodel.validation._cases import (
        cases_report,
        counter_of,
        measured_times_s,
        memory_bytes,
        predict_cases,
        unstated_share,
        validate_cases,
    )
    from perfmodel.validation._parity import parity_rows, validate_kernels
    from perfmodel.validation._prior_fit import fit_choice_priors
    from perfmodel.validation._report import ValidationReport, errors, fit_figures
    from perfmodel.validation._residuals import CaseResidual, explain_case, explain_cases
    from perfmodel.validation._run_assumptions import run_assumptions
    from perfmodel.validation._run_sources import drawn_of_sources, source_of_run
    from perfmodel.validation._site_fit import fit_sites, fit_sustained
    from perfmodel.validation._term_errors import EVERY_TERM, term_errors
    from perfmodel.validation._term_errors import MOST_ROWS as MOST_TERM_ROWS
    from perfmodel.validation._timeline_errors import TimelineErrors, compare_timelines
    from perfmodel.validation._trace_comparison import (
        TraceComparison,
        compare_traces,
        timeline_trace,
    )
    from perfmodel.validation.rows._cases import Case, read_case, read_runs
    from perfmodel.validation.unstated._described_run import JobRun, RowRun, described_job
    from perfmodel.validation.unstated._run_mixture import (
        RunPrediction,
        name_open_choices,
        predict_run,
    )

__getattr__, __dir__ = lazy_names(__name__)
