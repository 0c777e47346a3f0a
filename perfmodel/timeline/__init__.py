"""The evaluator: structure and durations in; times, memory, gradients out (JAX)."""

from perfmodel.display import shorten_reprs
from perfmodel.timeline._cache import SHARES as CACHE_SHARES
from perfmodel.timeline._cache import cache_dir as cache_dir
from perfmodel.timeline._cache import cache_limit_bytes as cache_limit_bytes
from perfmodel.timeline._cache import code_digest as code_digest
from perfmodel.timeline._cache import load_or_compile as load_or_compile
from perfmodel.timeline._compile import compile_structure as compile_structure
from perfmodel.timeline._lanes import makespan_lanes as makespan_lanes
from perfmodel.timeline._lanes import makespan_lanes_and_grad as makespan_lanes_and_grad
from perfmodel.timeline._makespan import makespan as makespan
from perfmodel.timeline._makespan import makespan_and_grad as makespan_and_grad
from perfmodel.timeline._many import ProgramBatch as ProgramBatch
from perfmodel.timeline._many import makespan_many as makespan_many
from perfmodel.timeline._memory import MemorySteps as MemorySteps
from perfmodel.timeline._memory import MemoryTimeline as MemoryTimeline
from perfmodel.timeline._memory import memory as memory
from perfmodel.timeline._page import STREAM_NAMES as STREAM_NAMES
from perfmodel.timeline._precision import double_precision as double_precision
from perfmodel.timeline._slices import KIND_NAMES as KIND_NAMES
from perfmodel.timeline._slices import Slices as Slices
from perfmodel.timeline._tables import CompiledStructure as CompiledStructure
from perfmodel.timeline._timeline import Timeline as Timeline
from perfmodel.timeline._timeline import slices as slices
from perfmodel.timeline._timeline import timeline_frame as timeline_frame
from perfmodel.timeline._timeline import times as times
from perfmodel.timeline._traces import TraceCount as TraceCount
from perfmodel.timeline._traces import count_traces as count_traces

shorten_reprs(__name__)
