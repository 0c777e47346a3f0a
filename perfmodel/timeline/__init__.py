"""The evaluator: structure and durations in; times, memory, gradients out (JAX)."""

from perfmodel.display import shorten_reprs
from perfmodel.timeline._cache import SHARES as CACHE_SHARES
from perfmodel.timeline._cache import cache_dir, cache_limit_bytes, code_digest, load_or_compile
from perfmodel.timeline._compile import compile_structure
from perfmodel.timeline._lanes import makespan_lanes, makespan_lanes_and_grad
from perfmodel.timeline._makespan import makespan, makespan_and_grad
from perfmodel.timeline._many import ProgramBatch, makespan_many
from perfmodel.timeline._memory import MemorySteps, MemoryTimeline, memory
from perfmodel.timeline._page import STREAM_NAMES
from perfmodel.timeline._precision import double_precision
from perfmodel.timeline._slices import KIND_NAMES, Slices
from perfmodel.timeline._tables import CompiledStructure
from perfmodel.timeline._timeline import Timeline, slices, timeline_frame, times
from perfmodel.timeline._traces import TraceCount, count_traces

shorten_reprs(__name__)
