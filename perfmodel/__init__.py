"""A performance model of distributed deep-learning training.

    import perfmodel as pm
    pm.predict("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)

This module offers the functions that the documentation shows and the records that they take.
Everything else, such as the records that they return, is in the packages below
(`perfmodel.catalog.devices`, `perfmodel.prediction.Site`). Names are imported on first use, so that
`import perfmodel` stays immediate and starts no backend.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from perfmodel.calibration import (
        Run,
        calibrate_end_to_end,
        calibrate_model,
        explain_profile,
        fit_profile,
        model_plan,
        plan_report,
    )
    from perfmodel.catalog import cluster, device, framework, model, problem
    from perfmodel.cost.learn import fit_calibration as fit
    from perfmodel.errors import PerfModelError
    from perfmodel.ingest import read_measurements, read_profile, read_trace
    from perfmodel.ingest.launch import export_launch, read_launch
    from perfmodel.ingest.tables import read_table
    from perfmodel.ir.importers import read_sharded, trace, trace_program
    from perfmodel.measure import read_plan, run_plan, write_plan
    from perfmodel.planning.compare_clusters import compare_clusters
    from perfmodel.planning.decision import report
    from perfmodel.planning.design import devices_for, memory_to_fit, overtake, rank_upgrades
    from perfmodel.planning.goodput import Reliability
    from perfmodel.planning.health import check_run, runs_of_logs
    from perfmodel.planning.layouts import (
        SearchOptions,
        Tariff,
        ask,
        default_space,
        pareto,
        restrict,
        search,
    )
    from perfmodel.planning.optimise import partition
    from perfmodel.planning.what_if import whatif
    from perfmodel.prediction import Prediction, compare_schedules, explain, predict, step_problem
    from perfmodel.prediction.differentiable import step_time_function
    from perfmodel.schedule import get_schedule, read_schedule, require_valid, schedule_facts
    from perfmodel.serving import engine_commands, serve, serve_sweep, starting_point
    from perfmodel.session import Session
    from perfmodel.spec import Cluster, Job, Layout, NetworkLevel, Problem, Transformer
    from perfmodel.validation import calibration_report, read_runs, validate_cases, validate_kernels
    from perfmodel.viz import gantt, write_gantt, write_trace


__getattr__, __dir__ = lazy_names(__name__)
