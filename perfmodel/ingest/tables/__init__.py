"""Files in and out: measurement tables, atomic writes."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.tables._atomic import drop_least_recently_used as drop_least_recently_used
from perfmodel.ingest.tables._atomic import mark_used as mark_used
from perfmodel.ingest.tables._atomic import write_atomic as write_atomic
from perfmodel.ingest.tables._atomic import write_bytes as write_bytes
from perfmodel.ingest.tables._atomic import write_json as write_json
from perfmodel.ingest.tables._atomic import write_text as write_text
from perfmodel.ingest.tables._columns import factorise as factorise
from perfmodel.ingest.tables._columns import groups_of as groups_of
from perfmodel.ingest.tables._columns import hashed as hashed
from perfmodel.ingest.tables._columns import number as number
from perfmodel.ingest.tables._columns import relabel as relabel
from perfmodel.ingest.tables._columns import text as text
from perfmodel.ingest.tables._run_columns import NEEDED_OF_RUNS as NEEDED_OF_RUNS
from perfmodel.ingest.tables._run_columns import RUN_COLUMNS as RUN_COLUMNS
from perfmodel.ingest.tables._tables import COLUMNS as COLUMNS
from perfmodel.ingest.tables._tables import REQUIRED as REQUIRED
from perfmodel.ingest.tables._tables import TableKind as TableKind
from perfmodel.ingest.tables._tables import read_table as read_table
from perfmodel.ingest.tables._tables import require_whole_rows as require_whole_rows
from perfmodel.ingest.tables._tables import table_kind as table_kind
from perfmodel.ingest.tables._tables import write_table as write_table

shorten_reprs(__name__)
