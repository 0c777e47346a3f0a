"""Files of benchmarks and profilers as measurement tables and as timelines of devices."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.ingest._chrome import chrome_trace, complete_event, name_event, write_chrome, write_measured_trace
    from perfmodel.ingest._hlo_modules import HLO_COLLECTIVES
    from perfmodel.ingest._measured_trace import (
        PHASES,
        Activity,
        ActivityKind,
        MeasuredTrace,
        merged_intervals,
        trace_of,
    )
    from perfmodel.ingest._profile import Call, Profile
    from perfmodel.ingest._public_tables import (
        OWN_ORDER,
        SERVER_KERNELS,
        clean_collectives,
        clean_kernels,
        fills_caches,
        held_under_load,
        is_marked_suspect,
        kernel_table_paths,
        published_collectives,
        quantises_operands,
    )
    from perfmodel.ingest._read import (
        FORMATS,
        TABLE_FORMATS,
        TRACE_FORMATS,
        detect_format,
        import_measurements,
        read_measurements,
        read_profile,
        read_trace,
    )
    from perfmodel.ingest._rows import Measurements, ReadOptions

__getattr__, __dir__ = lazy_names(__name__)
