"""A performance model of distributed deep-learning training.

    import perfmodel as pm
    pm.predict("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)

This module offers what most uses begin with: questions, the records that they take, and errors.
Everything else, such as calibration and the records that functions return, is in the packages below
(`perfmodel.catalog.devices`, `perfmodel.prediction.Site`). Names are imported on first use, so that
`import perfmodel` stays immediate and starts no backend.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from perfmodel.catalog import cluster, device, framework, model, problem
    from perfmodel.cost.learn import fit_calibration as fit
    from perfmodel.errors import PerfModelError
    from perfmodel.ingest.launch import export_launch, read_launch
    from perfmodel.ingest.tables import read_table
    from perfmodel.ir.importers import trace, trace_program
    from perfmodel.planning.compare_clusters import compare_clusters
    from perfmodel.planning.decision import report
    from perfmodel.planning.health import check_run, runs_of_logs
    from perfmodel.planning.layouts import SearchOptions, Tariff, ask, pareto, search
    from perfmodel.planning.optimise import partition
    from perfmodel.planning.what_if import whatif
    from perfmodel.prediction import Prediction, compare_schedules, predict, step_problem
    from perfmodel.prediction.differentiable import step_time_function
    from perfmodel.schedule import get_schedule, schedule_facts
    from perfmodel.serving import serve, serve_sweep, starting_point
    from perfmodel.session import Session
    from perfmodel.spec import Cluster, Job, Layout, Transformer
    from perfmodel.validation import read_runs
    from perfmodel.viz import gantt


__getattr__, __dir__ = lazy_names(__name__)
