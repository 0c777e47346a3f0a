"""Explicit programs: schedules and communication turned into structures of events."""

from perfmodel.program._structure import N_STREAMS as N_STREAMS
from perfmodel.program._structure import Kind as Kind
from perfmodel.program._structure import Stream as Stream
from perfmodel.program._structure import Structure as Structure
