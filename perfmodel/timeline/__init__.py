"""The evaluator: computes times, memory and gradients from structure and durations (JAX).

Every op starts when the later of its two predecessors has ended, so that the makespan is a longest
path: a recurrence of maxima and sums over the ops in program order, piecewise linear in the
durations. Its gradient counts how often each class of durations lies on the critical path.

- `_tables` compiles a structure to a flat program of integers: ops are ordered by levels, and their
  end times have slots that are reused, as a compiler allocates registers.
- `_loops` runs the program: for one vector of durations, for a row of them, or for many by bundles
  of independent ops; and it walks back from the end of the step, which is the gradient.
- `_makespan`, `_lanes` and `_many` make of these differentiable functions of one vector, of many
  vectors, and of many structures at once.
- `_timeline`, `_memory` and `_slices` say when each op runs, what is in memory then, and what is
  drawn.
- `_structure_files` keeps compiled structures on disk.
- `_compilations` keeps programs that JAX compiles on disk.
"""

from perfmodel.display import shorten_reprs
from perfmodel.timeline._compilations import keep_compilations, keep_long_compilations
from perfmodel.timeline._durations import TraceCount, being_traced, count_traces, double_precision
from perfmodel.timeline._lanes import makespan_lanes, makespan_lanes_and_grad
from perfmodel.timeline._makespan import makespan, makespan_and_grad
from perfmodel.timeline._many import ProgramBatch, makespan_many
from perfmodel.timeline._memory import MemorySteps, MemoryTimeline, memory
from perfmodel.timeline._slices import KIND_NAMES, STREAM_NAMES, Slices, slices
from perfmodel.timeline._structure_files import load_structure, save_structure
from perfmodel.timeline._tables import CompiledStructure, compile_structure
from perfmodel.timeline._timeline import Timeline, timeline_frame, times

shorten_reprs(__name__)
