"""One call timed until its median is known, and how much other work disturbed it meanwhile."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.measure.timing._harness import (
        MIN_CLEAN,
        WARMUP_CALLS,
        Sample,
        SampleCalls,
        StoppingRule,
        Timing,
        measuring_s,
        median_interval,
        run_for,
        sampling_s,
        time_calls,
    )
    from perfmodel.measure.timing._meter import (
        MachineMeter,
        Meter,
        NoMeter,
        OwnCoreMeter,
        Reading,
        busy_s,
        host_meter,
        machine_meter,
        pinned_to_one_core,
        wait_until_quiet,
    )

__getattr__, __dir__ = lazy_names(__name__)
