"""Explicit programs: schedules and communication turned into structures of events."""

from perfmodel.display import shorten_reprs
from perfmodel.program._build import build as build
from perfmodel.program._passes import Variants as Variants
from perfmodel.program._passes import variants_of as variants_of
from perfmodel.program._spec import GradReduce as GradReduce
from perfmodel.program._spec import ParamGather as ParamGather
from perfmodel.program._spec import ProgramSpec as ProgramSpec
from perfmodel.program._spec import Sends as Sends
from perfmodel.program._structure import N_STREAMS as N_STREAMS
from perfmodel.program._structure import Kind as Kind
from perfmodel.program._structure import Stream as Stream
from perfmodel.program._structure import Structure as Structure
from perfmodel.program._structure_builder import WHOLE as WHOLE

shorten_reprs(__name__)
