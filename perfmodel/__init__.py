"""A performance model of distributed deep-learning training.

    import perfmodel as pm
    pm.predict("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)

Names are imported on first use, so that `import perfmodel` stays immediate and starts no backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Cluster": "spec", "Device": "spec", "Job": "spec", "Layout": "spec", "Mlp": "spec", "ConvNet": "spec",
    "NetworkLevel": "spec", "PeakRates": "spec", "Transformer": "spec",
    "PerfModelError": "errors",
    "cluster": "catalog", "clusters": "catalog", "device": "catalog", "devices": "catalog",
    "model": "catalog", "models": "catalog",
    "read_table": "io",
    "fit": "learn",
    "Framework": "prediction", "Prediction": "prediction", "predict": "prediction",
    "compare_schedules": "prediction",
    "whatif": "what_if",
    "EndToEnd": "calibration", "Run": "calibration", "calibrate_end_to_end": "calibration",
    "OpTable": "importers", "read_onnx": "importers", "read_sharded": "importers", "trace": "importers",
    "trace_program": "importers",
    "schedule_facts": "schedule",
    "SearchResult": "layout_search", "search": "layout_search", "pareto": "layout_search", "ask": "layout_search",
    "Tariff": "layout_search",
    "devices_for": "design", "memory_to_fit": "design", "overtake": "design", "rank_upgrades": "design",
    "read_runs": "validation", "validate_cases": "validation", "validate_kernels": "validation",
    "gantt": "viz", "write_gantt": "viz", "write_trace": "viz",
}  # fmt: skip
_RENAMED = {"fit": "fit_calibration"}

if TYPE_CHECKING:
    from perfmodel.calibration import EndToEnd, Run, calibrate_end_to_end
    from perfmodel.catalog import cluster, clusters, device, devices, model, models
    from perfmodel.design import devices_for, memory_to_fit, overtake, rank_upgrades
    from perfmodel.errors import PerfModelError
    from perfmodel.importers import OpTable, read_onnx, read_sharded, trace, trace_program
    from perfmodel.io import read_table
    from perfmodel.layout_search import SearchResult, Tariff, ask, pareto, search
    from perfmodel.learn import fit_calibration as fit
    from perfmodel.prediction import Framework, Prediction, compare_schedules, predict
    from perfmodel.schedule import schedule_facts
    from perfmodel.spec import Cluster, ConvNet, Device, Job, Layout, Mlp, NetworkLevel, PeakRates, Transformer
    from perfmodel.validation import read_runs, validate_cases, validate_kernels
    from perfmodel.viz import gantt, write_gantt, write_trace
    from perfmodel.what_if import whatif


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'perfmodel' has no attribute {name!r}")
    value = getattr(import_module(f"perfmodel.{_HOME[name]}"), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
