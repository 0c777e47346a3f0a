"""Ranks that run collectives of torch.distributed (extra `torch`): gloo or NCCL."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from threading import Thread
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Self

from perfmodel.measure.ranks._rank import (
    Place,
    RankSession,
    Span,
    groups_at_once,
    local_elements,
    spans,
)
from perfmodel.ops import Collective, KernelOp
from perfmodel.ops.programs import TORCH_DTYPES, torch_module

Tensor = Any
"""A `torch.Tensor`."""


class GlooSession(RankSession):
    """Runs the one collective that is loaded, on the CPU."""

    transport: ClassVar[str] = "gloo"
    """Backend of torch.distributed."""
    device: ClassVar[str] = "cpu"
    """Kind of device that holds the data."""

    def __init__(self, place: Place) -> None:
        # One thread per rank, as ranks of a node share its cores. The device is chosen before NCCL
        # starts on it.
        self.rank = place.rank
        self._kernels: dict[KernelOp, Callable[[], Any]] = {}
        torch_module().set_num_threads(1)
        self.take_device(place.local_rank if place.device is None else place.device)
        _dist().init_process_group(
            self.transport,
            init_method=f"tcp://{place.coordinator}",
            rank=place.rank,
            world_size=place.num_ranks,
        )

    def take_device(self, index: int) -> None:
        """Make this rank's device the current one."""

    def load(self, op: Collective) -> None:
        """Make this rank's buffers: element i of the input holds i mod 1024, plus the rank."""
        torch = torch_module()
        dtype = getattr(torch, TORCH_DTYPES[op.dtype])
        count = local_elements(op)
        self._input = (torch.arange(count, device=self.device) % 1024 + self.rank).to(dtype)

        # All ranks make all groups, in the same order; one alone is the world.
        groups = groups_at_once(op)
        made = [None if len(groups) == 1 else _dist().new_group(ranks) for ranks in groups]
        group_index = next(number for number, ranks in enumerate(groups) if self.rank in ranks)
        self._members, self._group = groups[group_index], made[group_index]

        # A gather gives the parts of all ranks, a scatter leaves one part; others keep the size.
        sizes = {"all_gather": count * op.num_ranks, "reduce_scatter": count // op.num_ranks}
        self._output = torch.empty(sizes.get(op.collective, count), dtype=dtype, device=self.device)
        self._call = _CALLS[op.collective]
        self._reset()

    def run(self, calls: int) -> list[Span]:
        """Start and end of each of `calls` calls, after one that synchronises the ranks; they
        return when they are done."""
        return spans(calls, self._run_once)

    def time_kernel(self, op: KernelOp, calls: int, collectives: int) -> tuple[float, bool]:
        """Seconds of calls of a kernel while a number of the loaded collectives run, and whether
        these lasted longer.

        A thread of its own makes the collectives, as gloo's calls return when they are done.
        """
        call = self._kernel_call(op)
        call()
        self._run_once()
        load = Thread(target=self._run_often, args=(collectives,))
        load.start()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        wall_s = time.perf_counter() - start_s
        outlasted = load.is_alive() or not collectives
        load.join()
        return wall_s, outlasted

    def _kernel_call(self, op: KernelOp) -> Callable[[], Any]:
        """A call of a kernel whose inputs lie on this rank's device, made once for each kernel."""
        from perfmodel.measure.backends import Calls, torch_program

        if self._kernels.get(op) is None:
            # Inputs of the kernel before are let go of.
            self._kernels = {op: Calls(torch_program(op, self.device))}
        return self._kernels[op]

    def _run_often(self, calls: int) -> None:
        """Run the collective a number of times."""
        for _ in range(calls):
            self._run_once()

    def values(self) -> Any:
        """This rank's part of the result, as a NumPy array."""
        self._reset()
        self._run_once()
        return self._output.double().cpu().numpy()

    def leave(self) -> None:
        """Leave the group; nothing can be asked after this."""
        _dist().destroy_process_group()

    def _run_once(self) -> None:
        """Run the collective once."""
        place = self._members.index(self.rank)
        self._call(self._output, self._input, _Neighbours.of(self._members, place), self._group)

    def _reset(self) -> None:
        """Restore the buffer of an all-reduce, which sums in place."""
        if self._call is _CALLS["all_reduce"]:
            self._output.copy_(self._input)


GRAPH_CALLS: Final = 256
"""Most calls that one CUDA graph holds; longer bundles replay it."""


class NcclSession(GlooSession):
    """A session on GPUs, one per rank.

    The host needs about 10 to 20 us to launch a collective, longer than a small one takes inside a
    node. A CUDA graph launches a whole bundle at once, as frameworks that train with graphs do, so
    that its time is the collective's.
    """

    transport = "nccl"
    device = "cuda"

    def load(self, op: Collective) -> None:
        """Make this rank's buffers, and drop graphs of the previous collective."""
        super().load(op)
        self._graphs: dict[int, Any] = {}

    def take_device(self, index: int) -> None:
        torch = torch_module()
        if index >= torch.cuda.device_count():
            raise RuntimeError(
                f"NCCL needs one GPU per rank, and this node has {torch.cuda.device_count()}; use fewer ranks"
            )
        torch.cuda.set_device(index)

    def run(self, calls: int) -> list[Span]:
        """Spans of the bundle's graphs, each divided evenly over its calls.

        Times are those of events of the stream, which NCCL's kernels hold up: launches return
        before they are done.
        """
        # As many graphs of the full size as fit, and one for the rest.
        cuda = torch_module().cuda
        parts = [GRAPH_CALLS] * (calls // GRAPH_CALLS)
        remaining = calls % GRAPH_CALLS
        if remaining:
            parts.append(remaining)
        graphs = [self._graph(part) for part in parts]

        # One call lines the ranks up; all graphs are captured before.
        self._run_once()
        cuda.synchronize()
        events = [cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        events[0].record()
        for graph, event in zip(graphs, events[1:], strict=True):
            graph.replay()
            event.record()
        cuda.synchronize()
        clock_s = [1e-3 * events[0].elapsed_time(event) for event in events]
        return evenly_divided(clock_s, parts)

    def time_kernel(self, op: KernelOp, calls: int, collectives: int) -> tuple[float, bool]:
        """Seconds of calls of a kernel on one stream while a number of collectives run on another.

        Launches return before they are done, so that all collectives are queued before the first
        kernel.
        """
        cuda = torch_module().cuda
        call = self._kernel_call(op)
        call()
        self._run_once()
        cuda.synchronize()
        side_stream = cuda.Stream()
        ended = cuda.Event()
        with cuda.stream(side_stream):
            self._run_often(collectives)
            ended.record()
        start = cuda.Event(enable_timing=True)
        end = cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        outlasted = not ended.query() or not collectives
        cuda.synchronize()
        return 1e-3 * start.elapsed_time(end), outlasted

    def _graph(self, calls: int) -> Any:
        """A graph of several calls, captured once, by all ranks at the same time."""
        if calls not in self._graphs:
            cuda = torch_module().cuda
            # NCCL makes its connections in the first call, which no graph may hold.
            self._run_once()
            cuda.synchronize()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph):
                for _ in range(calls):
                    self._run_once()
            self._graphs[calls] = graph
        return self._graphs[calls]

    def leave(self) -> None:
        """Leave the group; graphs go first, since they hold on to its communicator."""
        self._graphs = {}
        super().leave()


def evenly_divided(clock_s: Sequence[float], parts: Sequence[int]) -> list[Span]:
    """Approximate spans of single calls, if only the ends of bundles were timed.

    Args:
        clock_s: start of the first bundle, then the end of each.
        parts: calls of each bundle.
    """
    # Calls inside a graph follow one another without a gap.
    divided: list[Span] = []
    for (start_s, end_s), calls in zip(pairwise(clock_s), parts, strict=True):
        call_s = (end_s - start_s) / calls
        divided += [(start_s + i * call_s, start_s + (i + 1) * call_s) for i in range(calls)]
    return divided


def _dist() -> Any:
    """`torch.distributed`, imported on first use, because torch need not be installed."""
    import torch.distributed  # pyright: ignore[reportMissingImports]

    return torch.distributed


class _Neighbours(NamedTuple):
    """The two neighbours of a rank in the ring of its group."""

    after: int
    before: int

    @classmethod
    def of(cls, members: Sequence[int], place: int) -> Self:
        """Neighbours of the member at a place."""
        return cls(members[(place + 1) % len(members)], members[place - 1])


def _ring_shift(output: Tensor, sent: Tensor, neighbours: _Neighbours, group: Any) -> None:
    """Each rank sends to the next and receives from the previous one, as in nccl-tests."""
    dist = _dist()
    send = dist.P2POp(dist.isend, sent, neighbours.after, group)
    receive = dist.P2POp(dist.irecv, output, neighbours.before, group)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()


def _single(name: str) -> Callable[..., Any]:
    """The form on single tensors, whose name changed between releases."""
    dist = _dist()
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, older[name])


_CALLS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {
        # In place, as training reduces gradients.
        "all_reduce": lambda output, mine, ring, group: _dist().all_reduce(output, group=group),
        "all_gather": lambda output, mine, ring, group: _single("all_gather")(
            output, mine, group=group
        ),
        "reduce_scatter": lambda output, mine, ring, group: _single("reduce_scatter")(
            output, mine, group=group
        ),
        "all_to_all": lambda output, mine, ring, group: _dist().all_to_all_single(
            output, mine, group=group
        ),
        "send_recv": _ring_shift,
    }
)
