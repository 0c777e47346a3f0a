"""Files of benchmarks and profilers as measurement tables and as timelines of devices."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.ingest._public_tables import (
        FILL_CACHES,
        OWN_ORDER,
        SERVER_KERNELS,
        UNDER_LOAD,
        clean_collectives,
        clean_kernels,
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
    from perfmodel.ingest.profiles._measured_trace import MeasuredTrace
    from perfmodel.ingest.profiles._profile import Profile

__getattr__, __dir__ = lazy_names(__name__)
