"""A torch.distributed process group in which only some ranks are real."""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

from perfmodel.emulate.environment import Call, EmulationError
from perfmodel.emulate.rank._effects import Effects, device_module, on_stream, type_of
from perfmodel.emulate.rank._lane import EmulatedWork, Lane
from perfmodel.emulate.rank._rank import CallPrice, Plan, Rank
from perfmodel.emulate.runs import CollectiveNote

Tensor = Any
"""A `torch.Tensor`."""
_REDUCTIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_ProcessGroup: Any = dist.ProcessGroup


class EmulatedGroup(_ProcessGroup):
    """Answers collectives with results of the right shapes after the modelled time."""

    def __init__(self, name: str, members: tuple[int, ...], rank: Rank, real: Any) -> None:
        """
        Args:
            name: name of the group, the same on all ranks.
            members: ranks of the world, in the group's order.
            rank: this process.
            real: process group of the real members; None where this is the only one.
        """
        # Two sets of real members: those whose calls must agree, and those that exchange data
        # (fewer where ranks are kept apart).
        place = members.index(rank.orders.rank)
        super().__init__(place, len(members))
        self.name_ = name
        self.members = members
        self._rank = rank
        self._real_members = tuple(m for m in members if m in rank.orders.real_ranks)
        exchanging = tuple(
            position for position, m in enumerate(members) if m in rank.orders.exchanging
        )
        self._effects = Effects(place, len(members), exchanging, real)
        self._lanes: dict[str, Lane] = {}
        self._sequence: dict[str, int] = {}
        rank.environment.ask("group", name, members)
        rank.at_end.append(self.shutdown)

    def try_out(self) -> None:
        """Measure the emulation overhead of a call, before the script starts."""
        # Without other real members, so that trials wait for nobody; sequence numbers start anew
        # afterwards.
        tensor = torch.zeros(1)
        members = self._real_members
        self._real_members = ()
        self._rank.measure_overhead(
            lambda at_once: dist.all_reduce(tensor, group=self, async_op=not at_once)
        )
        self._real_members = members
        self._sequence.clear()
        self._close_lanes()

    def getBackendName(self) -> str:
        return "emulated"  # by which torch's own code in C++ knows that it has no gloo or NCCL object to look into

    @property
    def group_name(self) -> str:
        return self.name_

    def _get_backend(self, device: Any) -> Any:
        return self

    supports_coalescing = False
    supports_splitting = False

    def _set_default_timeout(self, timeout: Any) -> None:
        """Ignore timeouts of torch, because the watchdog detects hanging ranks."""

    def _start_coalescing(self, device: Any) -> None:
        """Start coalescing: nothing to do, because each call is answered separately."""

    def _end_coalescing(self, device: Any) -> None:
        return None

    def _close_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def shutdown(self) -> None:
        self._close_lanes()
        self._effects.release()  # before the interpreter goes, as gloo's own threads demand

    abort = shutdown

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> EmulatedWork:
        tensors = _listed(tensors)
        op = _reduction(opts)
        call = _call("all_reduce", tensors, tensors, self._name_of_reduction(op))
        return self._submit(call, tensors, lambda: self._effects.all_reduce(tensors, op), opts)

    allreduce_coalesced = allreduce

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> EmulatedWork:
        """Gather tensors of all ranks on all ranks."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        call = _call("all_gather", list(chain(*outputs)), inputs)
        return self._submit(call, outputs, lambda: self._effects.all_gather(outputs, inputs), opts)

    def all_gather_single(
        self, output: Tensor, input_tensor: Tensor, opts: Any = None
    ) -> EmulatedWork:
        return self.all_gather_single_coalesced([output], [input_tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> EmulatedWork:
        """Gather several tensors, each into one output."""
        call = _call("all_gather", outputs, inputs)

        def effect() -> None:
            parts = [list(output.view(self.size(), -1)) for output in outputs]
            self._effects.all_gather(parts, [i.reshape(-1) for i in inputs])

        return self._submit(call, outputs, effect, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> EmulatedWork:
        """Reduce tensors, of which each rank keeps a share."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        op = _reduction(opts)
        call = _call("reduce_scatter", list(chain(*inputs)), outputs, self._name_of_reduction(op))
        return self._submit(
            call, outputs, lambda: self._effects.reduce_scatter(outputs, inputs, op), opts
        )

    def reduce_scatter_single(
        self, output: Tensor, input_tensor: Tensor, opts: Any = None
    ) -> EmulatedWork:
        return self.reduce_scatter_single_coalesced([output], [input_tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> EmulatedWork:
        """Reduce several tensors, of which each rank keeps a share."""
        op = _reduction(opts)
        call = _call("reduce_scatter", inputs, outputs, self._name_of_reduction(op))

        def effect() -> None:
            parts = [list(input_tensor.reshape(self.size(), -1)) for input_tensor in inputs]
            self._effects.reduce_scatter([output.view(-1) for output in outputs], parts, op)

        return self._submit(call, outputs, effect, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input_tensor: Tensor,
        output_sizes: Any = (),
        input_sizes: Any = (),
        opts: Any = None,
    ) -> EmulatedWork:
        """Exchange the parts of one tensor."""
        received = _split(output, output_sizes, self.size())
        sent = _split(input_tensor, input_sizes, self.size())
        return self._exchange(received, sent, input_tensor, [output], opts)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> EmulatedWork:
        return self._exchange(outputs, inputs, inputs, outputs, opts)

    def _exchange(
        self, received: Any, sent: Any, buffer: Any, result: Any, opts: Any
    ) -> EmulatedWork:
        # Sized by what this rank sends.
        call = Call("all_to_all", _nbytes(_listed(buffer)), type_of(sent))
        return self._submit(call, result, lambda: self._effects.all_to_all(received, sent), opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> EmulatedWork:
        tensors = _listed(tensors)
        root = _root(opts)
        call = _call("broadcast", tensors, tensors, f"root {self.members[root]}")
        return self._submit(call, tensors, lambda: self._effects.broadcast(tensors, root), opts)

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> EmulatedWork:
        """Reduce tensors on the root."""
        tensors = _listed(tensors)
        root = _root(opts)
        op = _reduction(opts)
        call = _call(
            "reduce", tensors, tensors, f"{self._name_of_reduction(op)}, root {self.members[root]}"
        )
        return self._submit(call, tensors, lambda: self._effects.reduce(tensors, root, op), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> EmulatedWork:
        """Gather tensors on the root."""
        root = _root(opts)
        # Priced like an all-gather, whose size is that of the result.
        nbytes = _nbytes(inputs) * self.size()
        call = Call("gather", nbytes, type_of(inputs), f"root {self.members[root]}")
        return self._submit(
            call, outputs, lambda: self._effects.gather(outputs, inputs, root), opts
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> EmulatedWork:
        """Distribute the root's tensors."""
        root = _root(opts)
        call = Call(
            "scatter",
            _nbytes(outputs) * self.size(),
            type_of(outputs),
            f"root {self.members[root]}",
        )
        return self._submit(
            call, outputs, lambda: self._effects.scatter(outputs, inputs, root), opts
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork:
        """Send a tensor to one rank."""
        call = _call("send", tensors, tensors)
        channel = f"{self.rank()}>{peer} tag {tag}"
        return self._submit(
            call, tensors, lambda: self._effects.send(tensors, peer, tag), None, channel, peer
        )

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork:
        """Receive a tensor from one rank."""
        call = _call("recv", tensors, tensors)
        channel = f"{peer}>{self.rank()} tag {tag}"
        return self._submit(
            call, tensors, lambda: self._effects.recv(tensors, peer, tag), None, channel, peer
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> EmulatedWork:
        return self._submit(Call("barrier", 1, "uint8"), [], self._effects.barrier, opts)

    def recv_anysource(self, *_: Any) -> Any:
        self._refuse("recv from any source; name the sender")

    def allgather_coalesced(self, *_: Any) -> Any:
        self._refuse("allgather_coalesced")

    def monitored_barrier(self, *_: Any, **__: Any) -> Any:
        self._refuse(
            "monitored_barrier; use barrier, because the watchdog names missing ranks anyway"
        )

    def split_group(self, *_: Any, **__: Any) -> Any:
        self._refuse("split_group; use new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        self._refuse("merge_remote_group")

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    """The same call under its name before torch 2.13."""

    def _name_of_reduction(self, op: Any) -> str:
        """Return the name of a reduction, on which real ranks must agree.

        A single real rank has nobody to agree with; looking the name up takes as long as the rest
        of a call.
        """
        if len(self._real_members) < 2:
            return ""
        return next(
            (name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), "other reduction"
        ).lower()

    def _refuse(self, feature: str) -> None:
        number = self._sequence.get("", 0)
        error = EmulationError(
            f"rank {self._rank.orders.rank}: call #{number} of group {self.name_}: not emulated: {feature}"
        )
        self._rank.fail(error)
        raise error

    def _submit(
        self,
        call: Call,
        result: Any,
        effect: Callable[[], None],
        opts: Any,
        channel: str = "",
        peer: int | None = None,
    ) -> EmulatedWork:
        """Queue a call after those of its channel, which is a whole group's or that of two ranks.

        Where the caller waits for it (`async_op=False`) it is done on return.
        """
        # Number the call within its channel, and note it.
        rank, record = self._rank, self._rank.record
        number = self._sequence[channel] = self._sequence.get(channel, -1) + 1
        if "sparse" in call.dtype.split():
            self._refuse(f"{call.kind} of a sparse tensor")
        begun_s, effect = on_stream(device_module(call.dtype), effect)
        noted = self._noted(call, channel, number)
        line = f"{self.name_}{channel and f', {channel}'}"
        call_name = f"rank {rank.orders.rank}: {call.kind} #{number} of group {line}"
        # The watchdog reads this where a rank hangs.
        record.tell(call_name)

        parties = self._parties(call, peer)
        emulated = len(parties.ranks) - len(parties.real_ranks)
        at_once = not getattr(opts, "asyncOp", True)

        def plan() -> Plan:
            # The plan is made when the lane comes to the call: only then do the kernels before it
            # and the other ranks count.
            rank.conditions.check_alive(parties.ranks, call_name)
            start_s = begun_s(noted.issued_s)
            if len(parties.real_ranks) > 1:
                start_s = rank.environment.meet(
                    line, parties.real_ranks, number, parties.agreed, start_s
                )
            # Between real ranks alone the data really travel, which takes its time by itself.
            priced = emulated > 0 or rank.orders.apart
            price = rank.price(self.name_, call, at_once) if priced else CallPrice()
            delay_s = price.delay_s
            late_s = rank.conditions.late_s(noted.issued_s, emulated)
            # A group of one sends nothing across a network that could be slower.
            if len(parties.ranks) > 1:
                delay_s += rank.conditions.extra_s(call.kind, noted.iteration)
            return Plan(
                start_s + late_s,
                delay_s,
                price.core_s,
                price.overhead_s,
                price.core_overhead_s,
            )

        # Answer the call when it is due.
        work = EmulatedWork(noted, call, plan, effect, result, rank.conditions.together)
        if channel not in self._lanes:
            self._lanes[channel] = Lane(rank.fail, rank.orders.pinned, rank.copies_per_s)
        # A caller that waits is answered on its own thread: handing over to another would cost two
        # wake-ups.
        if at_once:
            record.served(self._lanes[channel].answer(work))
            rank.conditions.together(noted.wait_end_s)
        else:
            self._lanes[channel].put(work)
        return work

    def _noted(self, call: Call, channel: str, number: int) -> CollectiveNote:
        """A note of a call that begins now, which is filled in while the call runs."""
        record = self._rank.record
        note = CollectiveNote(
            self.name_,
            channel,
            self.size(),
            number,
            call.kind,
            call.nbytes,
            record.iteration,
            time.perf_counter(),
            record.thread_s(),
        )
        record.collectives.append(note)
        return note

    def _parties(self, call: Call, peer: int | None) -> "_Parties":
        """The ranks of a call (a message if it has a `peer`), and what real ones agree on."""
        # The two sides of a message must agree on its size, not on who sends.
        orders = self._rank.orders
        if peer is not None:
            ranks = (orders.rank, self.members[peer])
            real_ranks = tuple(sorted({*ranks} & {*orders.real_ranks}))
            return _Parties(ranks, real_ranks, Call("message", call.nbytes, call.dtype))

        # Ranks of an all-to-all may send different numbers of bytes: only the type must agree.
        agreed = Call("all_to_all", 0, call.dtype) if call.kind == "all_to_all" else call
        return _Parties(self.members, self._real_members, agreed)


class _Parties(NamedTuple):
    """The ranks that take part in a call."""

    ranks: tuple[int, ...]
    """Ranks of the world."""
    real_ranks: tuple[int, ...]
    """Those with a process, which must agree before the call begins."""
    agreed: Call
    """Parameters of the call, on which they agree."""


def _call(kind: str, sized: Sequence[Tensor], typed: Sequence[Tensor], detail: str = "") -> Call:
    return Call(kind, _nbytes(sized), type_of(typed), detail)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _reduction(opts: Any) -> Any:
    return getattr(opts, "reduceOp", dist.ReduceOp.SUM)


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)


def _split(buffer: Tensor, sizes: Sequence[int], parts: int) -> list[Tensor]:
    return list(buffer.split(list(sizes)) if len(sizes) else buffer.chunk(parts))
