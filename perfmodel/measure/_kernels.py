"""Kernels timed on the device of a backend."""

from perfmodel.measure._backend import Backend
from perfmodel.measure._harness import StoppingRule, time_calls
from perfmodel.measure._rows import SOURCE, Point, Row, op_columns, timing_columns

_SHORTEST_S = 1e-9
"""`min_sample_s` of cold samples: they cannot be bundled, and end after one call."""


def kernel_row(backend: Backend, point: Point, device_name: str, rule: StoppingRule) -> Row:
    """Measure one op: its row of the table."""
    op, cold = point.kernel, point.cold
    timing = time_calls(backend.sampler(op, cold=cold), sampling_rule(rule, backend, cold))
    return {
        "source": SOURCE,
        "device": device_name,
        **op_columns(op),
        **timing_columns(timing, rule, backend.variant(op), cold=cold),
        "software": backend.software,
    }


def sampling_rule(rule: StoppingRule, backend: Backend, cold: bool) -> StoppingRule:
    """The rule with samples as long as the backend's meter resolves; of a single call where caches are cold."""
    return (rule.with_samples_of(_SHORTEST_S) if cold else rule).resolved_by(backend.meter)


def call_overhead_s(backend: Backend, rule: StoppingRule) -> float:
    """Time of a call that does next to nothing, which every measured time contains."""
    return time_calls(backend.overhead_sampler(), rule.resolved_by(backend.meter)).median_s
