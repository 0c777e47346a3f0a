"""Files in and out: measurement tables, atomic writes."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.ingest.tables._atomic import (
        write_atomic,
        write_bytes,
        write_json,
        write_text,
    )
    from perfmodel.ingest.tables._columns import (
        codes_by_appearance,
        factorise,
        groups_of,
        hashed,
        median_ratio,
        number,
        relabel,
        text,
    )
    from perfmodel.ingest.tables._tables import (
        COLUMNS,
        NEEDED_OF_RUNS,
        REQUIRED,
        RUN_COLUMNS,
        TableKind,
        read_csv,
        read_table,
        require_table_file,
        table_kind,
        write_table,
    )

__getattr__, __dir__ = lazy_names(__name__)
