"""Explicit programs: schedules and communication turned into structures of events."""

from perfmodel.display import shorten_reprs
from perfmodel.program._build import binary_joins, build
from perfmodel.program._passes import Variants, variants_of
from perfmodel.program._spec import GradReduce, ParamGather, ProgramSpec, Sends
from perfmodel.program._structure import COMBINED, N_STREAMS, PAIRED, Kind, Stream, Structure
from perfmodel.program._structure_builder import WHOLE, Edges

shorten_reprs(__name__)
