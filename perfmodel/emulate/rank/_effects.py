"""Fills buffers after collectives: real data from real ranks, placeholders from emulated ones.

Emulated ranks compute nothing. They add nothing to reductions. Parts that they would have gathered
or sent are copies of this rank's own, so that sizes which scripts exchange are plausible; messages
from an emulated rank are zeros.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

Tensor = Any
"""A `torch.Tensor`."""


class Effects:
    """Effects of the collectives of one group on the buffers of one rank."""

    _group: Any

    def __init__(self, place: int, size: int, real: tuple[int, ...], group: Any) -> None:
        """
        Args:
            place: this rank's place in the group.
            size: ranks of the group.
            real: places of the real ranks, in order.
            group: process group of these; None for one.
        """
        self._own = place
        self._size = size
        self._real = real
        self._group = group

    def release(self) -> None:
        """Leave the group of the real ranks."""
        self._group = None

    def all_reduce(self, tensors: Sequence[Tensor], op: Any) -> None:
        """Reduce tensors over the real ranks."""
        if self._group is not None:
            # Emulated ranks add nothing, so the sum over the real ranks is the whole.
            options = dist.AllreduceOptions()
            options.reduceOp = op
            for tensor in tensors:
                if op != dist.ReduceOp.AVG:
                    self._group.allreduce([tensor], options).wait()
                    continue
                # Not all versions of gloo have an average of their own.
                self._group.allreduce([tensor]).wait()
                if tensor.is_floating_point():
                    tensor.div_(len(self._real))
                else:
                    tensor.floor_divide_(len(self._real))

    def all_gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        """Gather the tensors of real ranks; the places of emulated ranks get copies of this one."""
        for parts, sent in zip(outputs, inputs, strict=True):
            # The places of emulated ranks get copies of this rank's own data: sizes that scripts
            # exchange (of objects, of padded batches) then fit. Real ranks' data follow and
            # overwrite theirs.
            for part in parts:
                if part.data_ptr() != sent.data_ptr():
                    reshaped = sent.view_as(part) if part.shape != sent.shape else sent
                    part.copy_(reshaped)
            if self._group is not None:
                self._group.allgather(
                    [[parts[place] for place in self._real]], [sent.contiguous()]
                ).wait()

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any
    ) -> None:
        """Reduce over the real ranks, and keep the share of this rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            if self._group is None:
                output.copy_(parts[self._own].view_as(output))
                continue
            # Only the shares of real ranks are needed: all-reduce these and keep the own one.
            reduced = torch.stack([parts[place].reshape(-1) for place in self._real])
            self.all_reduce([reduced], op)
            output.copy_(reduced[self._real.index(self._own)].view_as(output))

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Exchange parts with real ranks; those of emulated ranks get data of the right size."""
        # Data for an emulated rank come back as if it had sent them; where sizes differ, no data
        # fit.
        for place, part in enumerate(received):
            sent_part = sent[place]
            if part.shape == sent_part.shape:
                part.copy_(sent_part)
            elif place == self._own or place not in self._real:
                part.zero_()
        if self._group is not None:
            # Sends and receives are posted before any is awaited, or real ranks would wait for one
            # another.
            requests = []
            for number, place in enumerate(self._real):
                if place != self._own:
                    requests.append(self._group.send([sent[place].contiguous()], number, 0))
                    requests.append(self._group.recv([received[place]], number, 0))
            for request in requests:
                request.wait()

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> None:
        """Broadcast from an emulated root: every rank gets the data of the lowest real rank."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = self._real.index(root) if root in self._real else 0
            for tensor in tensors:
                self._group.broadcast([tensor], options).wait()

    def reduce(self, tensors: Sequence[Tensor], root: int, op: Any) -> None:
        """Reduce tensors on the root."""
        if self._group is not None:
            copies = [tensor.clone() for tensor in tensors]
            self.all_reduce(copies, op)
            if root == self._own:
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], root: int
    ) -> None:
        """Gather the tensors of all ranks on the root."""
        # A gather is an all-gather of which all but the root drop the result.
        outputs_of_all: list[list[Tensor]] = []
        if self._group is not None:
            for sent in inputs:
                outputs_of_all.append([torch.empty_like(sent) for _ in range(self._size)])
            self.all_gather(outputs_of_all, inputs)
        else:
            for sent in inputs:
                outputs_of_all.append([sent] * self._size)
        if root == self._own:
            for parts, gathered in zip(outputs, outputs_of_all, strict=True):
                for part, data in zip(parts, gathered, strict=True):
                    part.copy_(data)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], root: int
    ) -> None:
        """Take this rank's part of the root's tensors; zeros if the root is emulated."""
        for number, output in enumerate(outputs):
            parts = list(inputs[number]) if root == self._own else []
            if root == self._own:
                output.copy_(parts[self._own])
            elif root not in self._real:
                output.zero_()
            if self._group is not None and root in self._real:
                options = dist.ScatterOptions()
                options.rootRank = self._real.index(root)
                sent = [[parts[place] for place in self._real]] if parts else []
                self._group.scatter([output], sent, options).wait()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        if peer in self._real:
            self._group.send(list(tensors), self._real.index(peer), tag).wait()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        if peer in self._real:
            self._group.recv(list(tensors), self._real.index(peer), tag).wait()
        else:
            for tensor in tensors:
                tensor.zero_()

    def barrier(self) -> None:
        if self._group is not None:
            self._group.barrier().wait()


def type_of(tensors: Sequence[Tensor]) -> str:
    """Return the tensors' element type, after device and layout if not CPU and strided."""
    # The CPU is the usual place and goes unsaid.
    first = tensors[0]
    qualifiers = [first.device.type] if first.device.type != "cpu" else []
    if first.layout != torch.strided:
        qualifiers += ["sparse"]
    return " ".join([*qualifiers, str(first.dtype).removeprefix("torch.")])


def device_module(dtype: str) -> Any:
    """Return torch's module for the device in a result of `type_of`; None for the CPU."""
    kind = dtype.split()[0]
    return torch.get_device_module(kind) if " " in dtype and kind != "sparse" else None


def on_stream(
    device: Any, effect: Callable[[], None]
) -> tuple[Callable[[float], float], Callable[[], None]]:
    """Order a call on GPU tensors after earlier kernels, and end it when its data are complete.

    Args:
        device: module of the device (such as `torch.cuda`); None for the CPU, where both are as
            they were.
        effect: function that writes the call's result into the buffers.

    Returns:
        From the moment of the call to the one when it can begin, for which it waits; and the
        effect.
    """
    if device is None:
        return lambda issued_s: issued_s, effect
    # An event marks the kernels queued before the call; the CPU runs ahead of the GPU, and only the
    # event shows when they are done.
    event = device.Event()
    event.record()

    def begun_s(issued_s: float) -> float:
        event.synchronize()
        return max(issued_s, time.perf_counter())

    def finished() -> None:
        effect()
        device.current_stream().synchronize()

    return begun_s, finished
