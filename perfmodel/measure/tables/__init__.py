"""Growing measurement tables: rows and keys, cards, resuming, and comparison."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.measure.tables._card import (
        SCHEMA_VERSION,
        UNITS,
        Card,
        card_path,
        collector_sha256,
        read_card,
        software,
        write_card,
    )
    from perfmodel.measure.tables._diff import compare
    from perfmodel.measure.tables._rows import (
        BESIDE,
        COLD,
        LOADED,
        MEASURED,
        NOT_IDENTITY,
        SOURCE,
        SUSPECT,
        Point,
        Row,
        collective_columns,
        is_suspect,
        op_columns,
        point_key,
        present,
        row_key,
        state_of,
        timing_columns,
    )
    from perfmodel.measure.tables._sweep import (
        LOCK_NAME,
        Measure,
        PartialFile,
        Record,
        is_pending,
        locked,
        sweep,
    )

__getattr__, __dir__ = lazy_names(__name__)
