"""Ranks on PyTorch: its kernels, and collectives of torch.distributed (NCCL where every rank has a
GPU, else gloo)."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from perfmodel.ir import Instruction, Tensor
from perfmodel.ir.execution._reference import argument
from perfmodel.ir.execution._session import Local, ProgramSession, RankCode
from perfmodel.ir.execution.events import EventSession
from perfmodel.ir.execution.torch_kernels import torch_dtype, torch_kernel
from perfmodel.measure import usable_cores
from perfmodel.measure.ranks import Place
from perfmodel.ops.programs import torch_module

TorchTensor = Any
"""A `torch.Tensor`; torch is installed only with the extra."""


def _dist() -> Any:
    return torch_module().distributed


class TorchProgramSession(ProgramSession):
    """Runs a rank's code in a process group of torch.distributed."""

    def __init__(self, place: Place) -> None:
        dist = _dist()
        # JAX only holds arguments here; left alone it would reserve the GPU's memory.
        jax.config.update("jax_platforms", "cpu")
        torch = torch_module()
        torch.set_num_threads(len(usable_cores()))
        # NCCL wants a GPU for each rank.
        one_gpu_per_rank = torch.cuda.device_count() >= place.num_ranks
        self._device = torch.device("cuda", place.rank) if one_gpu_per_rank else torch.device("cpu")
        dist.init_process_group(
            "nccl" if one_gpu_per_rank else "gloo",
            init_method=f"tcp://{place.coordinator}",
            rank=place.rank,
            world_size=place.num_ranks,
        )
        self.rank = place.rank
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(place.num_ranks)): dist.group.WORLD}

    def load(self, code: RankCode) -> None:
        """Make the process groups (collectively, so all ranks make all of them in one order), then
        load the code."""
        dist = _dist()
        for group in code.all_groups:
            members = tuple(sorted(group))
            if members not in self._groups:
                self._groups[members] = dist.new_group(list(members))
        super().load(code)

    def communicator(
        self, instruction: Instruction, group: tuple[int, ...], operand: Tensor
    ) -> Local:
        """Return the function that this rank calls to take part in a collective."""
        handle = self._groups.get(tuple(sorted(group)))  # none of a rank alone
        return _Collective(instruction, group, operand, self.rank, handle, self._device)

    def place(self, name: str, tensor: Tensor, arguments: Mapping[str, np.ndarray]) -> TorchTensor:
        """A parameter's value on this rank's device."""
        return _to_torch(np.array(argument(name, tensor, arguments))).to(self._device)

    def kernel(
        self, instruction: Instruction, outputs: Sequence[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        """Return the function that runs an instruction of this rank alone."""
        return torch_kernel(instruction, outputs, self._device)

    def finished(self, results: Sequence[Any]) -> Sequence[Any]:
        """Wait for results."""
        if self._device.type == "cuda":
            torch_module().cuda.synchronize(self._device)
        return results

    def array(self, value: TorchTensor) -> np.ndarray:
        """A value of the program for the caller."""
        return _to_numpy(value.cpu().contiguous())

    def _line_up(self) -> None:
        _dist().barrier()

    def leave(self) -> None:
        """Leave the group; the session cannot be used afterwards."""
        _dist().destroy_process_group()


class TorchEventSession(TorchProgramSession, EventSession):
    """Times kernels and transfers on PyTorch."""


class _Collective:
    """One collective of one rank. Members are kept in the instruction's order, torch sorts them."""

    def __init__(
        self,
        instruction: Instruction,
        group: tuple[int, ...],
        operand: Tensor,
        rank: int,
        handle: Any,
        device: Any,
    ) -> None:
        self.group = group
        self.rank = rank
        self.handle = handle
        self.values: dict[str, Any] = dict(instruction.attributes)
        self._body = _BODIES[instruction.op]
        self._nothing = torch_module().zeros(
            operand.shape, dtype=torch_dtype(operand), device=device
        )

    def __call__(self, operand: TorchTensor | None) -> tuple[TorchTensor]:
        # torch reduces in place, and the operand may have other users.
        copy = (self._nothing if operand is None else operand).clone(
            memory_format=torch_module().contiguous_format
        )
        return (self._body(self, copy) if len(self.group) > 1 else copy,)

    @property
    def place(self) -> int:
        """This rank's position among the members."""
        return self.group.index(self.rank)

    def in_order(self, by_rank: Sequence[TorchTensor]) -> list[TorchTensor]:
        """Reorder values that torch returns by rank into the order of the members."""
        tensor_of = dict(zip(sorted(self.group), by_rank, strict=True))
        return [tensor_of[member] for member in self.group]


def _to_torch(array: np.ndarray) -> TorchTensor:
    torch = torch_module()
    if array.dtype.name == "bfloat16":  # which numpy and torch do not share
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: TorchTensor) -> np.ndarray:
    torch = torch_module()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def _send(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Send and acknowledge, so that the sender, too, ends when the message has arrived."""
    # The acknowledgement goes the other way, so neither side is done before both are.
    torch = torch_module()
    dist = _dist()
    acknowledgement = torch.zeros(1, device=x.device)
    if collective.place == 0:
        dist.send(x, collective.group[1])
        dist.recv(acknowledgement, collective.group[1])
    else:
        dist.recv(x, collective.group[0])
        dist.send(acknowledgement, collective.group[0])
    return x


def _broadcast(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Overwrite every member's tensor with that of the first member."""
    _dist().broadcast(x, collective.group[0], group=collective.handle)
    return x


def _reduced(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Overwrite every member's tensor with the sum or maximum over members."""
    dist = _dist()
    op = dist.ReduceOp.MAX if collective.values.get("op", "sum") == "max" else dist.ReduceOp.SUM
    dist.all_reduce(x, op, group=collective.handle)
    return x


def _gathered(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Concatenate the tensors of all members."""
    torch = torch_module()
    dist = _dist()
    parts = [torch.empty_like(x) for _ in collective.group]
    dist.all_gather(parts, x.contiguous(), group=collective.handle)
    return torch.cat(collective.in_order(parts), dim=collective.values["axis"])


def _reduce_scatter(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Reduce everywhere and keep a part: gloo has no reduce-scatter for every reduction."""
    return (
        _reduced(collective, x)
        .chunk(len(collective.group), collective.values["axis"])[collective.place]
        .contiguous()
    )


def _all_to_all(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Send a part to every member, and concatenate the parts received."""
    torch = torch_module()
    dist = _dist()
    parts = dict(
        zip(
            collective.group,
            x.chunk(len(collective.group), collective.values["split_axis"]),
            strict=True,
        )
    )
    # torch numbers the members of a group by rank, the program by order of operands: sort on the
    # way out, restore on the way back.
    sent = torch.stack([parts[member] for member in sorted(collective.group)]).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=collective.handle)
    return torch.cat(collective.in_order(list(received)), dim=collective.values["concat_axis"])


def _scatter(collective: _Collective, x: TorchTensor) -> TorchTensor:
    """Take this receiver's part of the first member's tensor."""
    receivers = collective.values["to"]
    parts = _broadcast(collective, x).chunk(len(receivers), collective.values["axis"])
    # A rank that receives nothing takes the first part, which it does not use.
    place = receivers.index(collective.rank) if collective.rank in receivers else 0
    return parts[place].contiguous()


_BODIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "send": _send,
        "broadcast": _broadcast,
        "all_reduce": _reduced,
        "reduce": _reduced,
        "all_gather": _gathered,
        "gather": _gathered,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "scatter": _scatter,
    }
)
