"""Launch files of training frameworks as models, layouts and jobs, and layouts as launch files."""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.launch._export import comparable as comparable
from perfmodel.ingest.launch._export import export_launch as export_launch
from perfmodel.ingest.launch._export import write_launch as write_launch
from perfmodel.ingest.launch._format import LaunchFormat as LaunchFormat
from perfmodel.ingest.launch._launch import Launch as Launch
from perfmodel.ingest.launch._read import FORMATS as FORMATS
from perfmodel.ingest.launch._read import format_of_path as format_of_path
from perfmodel.ingest.launch._read import launch_format as launch_format
from perfmodel.ingest.launch._read import parse_launch as parse_launch
from perfmodel.ingest.launch._read import read_launch as read_launch

shorten_reprs(__name__)
