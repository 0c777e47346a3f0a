"""Files in and out: measurement tables, atomic writes."""

from perfmodel.display import shorten_reprs
from perfmodel.io._atomic import write_atomic as write_atomic
from perfmodel.io._atomic import write_bytes as write_bytes
from perfmodel.io._atomic import write_json as write_json
from perfmodel.io._atomic import write_text as write_text
from perfmodel.io._columns import factorise as factorise
from perfmodel.io._columns import groups_of as groups_of
from perfmodel.io._columns import hashed as hashed
from perfmodel.io._columns import number as number
from perfmodel.io._columns import relabel as relabel
from perfmodel.io._columns import text as text
from perfmodel.io._least_recently_used import drop_least_recently_used as drop_least_recently_used
from perfmodel.io._least_recently_used import mark_used as mark_used
from perfmodel.io._tables import read_table as read_table
from perfmodel.io._tables import require_whole_rows as require_whole_rows
from perfmodel.io._tables import table_kind as table_kind
from perfmodel.io._tables import write_table as write_table

shorten_reprs(__name__)
