"""Files in and out: measurement tables, atomic writes."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.tables._atomic import (
    drop_least_recently_used,
    mark_used,
    write_atomic,
    write_bytes,
    write_json,
    write_text,
)
from perfmodel.ingest.tables._columns import factorise, groups_of, hashed, number, relabel, text
from perfmodel.ingest.tables._run_columns import NEEDED_OF_RUNS, RUN_COLUMNS
from perfmodel.ingest.tables._tables import (
    COLUMNS,
    REQUIRED,
    TableKind,
    read_table,
    require_whole_rows,
    table_kind,
    write_table,
)

shorten_reprs(__name__)
