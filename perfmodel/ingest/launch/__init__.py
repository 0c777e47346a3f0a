"""Launch files of training frameworks as models, layouts and jobs, and layouts as launch files."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.launch._changes import FileChanges, SettingChange, changed_settings
from perfmodel.ingest.launch._export import (
    LaunchFile,
    comparable,
    export_launch,
    launch_file,
    write_launch,
)
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._harm import Harm, Unread, listed
from perfmodel.ingest.launch._hooks import HOOKS, hook_lines
from perfmodel.ingest.launch._launch import Launch
from perfmodel.ingest.launch._megatron_settings import pipeline_segments
from perfmodel.ingest.launch._model import shape
from perfmodel.ingest.launch._read import parse_launch, read_launch
from perfmodel.ingest.launch._recognise import FORMATS, format_of_path, launch_format
from perfmodel.ingest.launch._saving import save_every
from perfmodel.ingest.launch._table import BadValue

shorten_reprs(__name__)
