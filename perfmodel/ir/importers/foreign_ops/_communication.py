"""Collectives of torch.distributed in the functional form that `torch.export` produces.

The graph is one rank's part, and stands for those of all ranks of its group, which do the same at
the same time. So a collective becomes an instruction with `replicas` (`perfmodel.ir.ops`), and the
graph a program of one device.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir.importers._emitter import CannotMapError, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, ForeignOp, foreign_ops

_REDUCTIONS: Final = ("sum", "avg", "max")


def _replicas(call: Call) -> tuple[int, int]:
    """Return the attributes of a group, which must be all ranks, one device apart."""
    ranks = int(call.attributes.get("ranks", 1))
    if ranks == 1:
        raise CannotMapError(
            "the module belongs to one of several ranks; read it by rank_program, and give the number of ranks"
        )
    # An all-reduce does not say how large its group is.
    group_size = int(call.value("group_size", ranks))
    if group_size != ranks:
        raise CannotMapError(
            f"a collective of {group_size} of the {ranks} ranks; only collectives of all ranks can be read"
        )
    return ranks, 1


def _reduced(call: Call, collective: str, **axes: int) -> Ref:
    """A sum, mean or maximum over the ranks."""
    reduction = call.value("reduction")
    if reduction not in _REDUCTIONS:
        raise CannotMapError(f"the reduction {reduction}; the IR has {', '.join(_REDUCTIONS)}")
    replicas = _replicas(call)
    op = "max" if reduction == "max" else "sum"
    result = call.op(collective, call.ref("x"), op=op, replicas=replicas, **axes)
    # A mean is a sum that is scaled afterwards.
    return call.scaled(result, 1 / replicas[0]) if reduction == "avg" else result


def _all_reduce(call: Call) -> Ref:
    return _reduced(call, "all_reduce")


def _reduce_scatter(call: Call) -> Ref:
    # torch scatters and gathers along the first axis.
    return _reduced(call, "reduce_scatter", axis=0)


def _all_gather(call: Call) -> Ref:
    return call.op("all_gather", call.ref("x"), axis=0, replicas=_replicas(call))


def _all_to_all(call: Call) -> Ref:
    """Exchange parts along the first axis."""
    part_sizes = {*call.integers("received_sizes"), *call.integers("sent_sizes")}
    if len(part_sizes) != 1:
        raise CannotMapError("an all-to-all of unequal parts; the IR has equal parts only")
    return call.op(
        "all_to_all", call.ref("x"), split_axis=0, concat_axis=0, replicas=_replicas(call)
    )


def _waited(call: Call) -> Ref:
    """Wait for a collective: its result, because instructions are synchronous."""
    return call.ref("x")


COMMUNICATION: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops("_c10d_functional::all_reduce(x, reduction)", rule=_all_reduce),
        **foreign_ops(
            "_c10d_functional::reduce_scatter_tensor(x, reduction, group_size)",
            rule=_reduce_scatter,
        ),
        **foreign_ops("_c10d_functional::all_gather_into_tensor(x, group_size)", rule=_all_gather),
        **foreign_ops(
            "_c10d_functional::all_to_all_single(x, received_sizes, sent_sizes)", rule=_all_to_all
        ),
        **foreign_ops("_c10d_functional::wait_tensor(x)", rule=_waited),
    }
)
"""Ops by name."""
