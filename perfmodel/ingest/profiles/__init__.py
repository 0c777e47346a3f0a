"""Files of profilers as timelines of devices and as calls of operators: Kineto, Nsight Systems,
JAX.

Beside this door is `chrome`, the format in which traces are written.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.ingest.profiles._hlo_modules import HLO_COLLECTIVES
    from perfmodel.ingest.profiles._jax_profile import (
        XplaneFile,
        is_jax_trace,
        read_jax_traces,
        read_xplane,
        xplane_activities,
        xplane_calls,
        xplane_paths,
        xplane_rows,
    )
    from perfmodel.ingest.profiles._kineto import is_kineto, kineto_activities, read_kineto
    from perfmodel.ingest.profiles._kineto_calls import kineto_calls, kineto_rows
    from perfmodel.ingest.profiles._measured_trace import (
        PHASES,
        Activity,
        ActivityKind,
        MeasuredTrace,
        Tags,
        merged_intervals,
        parse_tags,
        trace_of,
    )
    from perfmodel.ingest.profiles._nsys import is_sqlite, nsys_calls, nsys_rows, read_nsys
    from perfmodel.ingest.profiles._profile import Call, Detail, Profile, family_of, profile_of
    from perfmodel.ingest.profiles._torch_ops import AUTOGRAD, TorchOp, op_row
    from perfmodel.ingest.profiles._xspace import read_xspace

__getattr__, __dir__ = lazy_names(__name__)
