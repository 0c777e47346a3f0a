"""The evaluator: structure and durations in; times, memory, gradients out (JAX)."""

from perfmodel.display import shorten_reprs
from perfmodel.timeline._cache import SHARES as CACHE_SHARES
from perfmodel.timeline._cache import cache_dir, cache_limit_bytes, code_digest, load_or_compile
from perfmodel.timeline._durations import TraceCount, count_traces, double_precision
from perfmodel.timeline._lanes import makespan_lanes, makespan_lanes_and_grad
from perfmodel.timeline._makespan import makespan, makespan_and_grad
from perfmodel.timeline._many import ProgramBatch, makespan_many
from perfmodel.timeline._memory import MemorySteps, MemoryTimeline, memory
from perfmodel.timeline._slices import KIND_NAMES, STREAM_NAMES, Slices, slices
from perfmodel.timeline._tables import CompiledStructure, compile_structure
from perfmodel.timeline._timeline import Timeline, timeline_frame, times

shorten_reprs(__name__)
