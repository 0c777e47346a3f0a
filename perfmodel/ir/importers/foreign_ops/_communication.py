"""Collectives of torch.distributed in their functional form, which `torch.export` gives them all.

The graph is one rank's part, and stands for those of all ranks of its group, which do the same at the same time. So a
collective becomes an instruction with `replicas` (`perfmodel.ir.ops`), and the graph a program of one device.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir.importers._emitter import CannotMapError, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, Rule

_REDUCTIONS: Final = ("sum", "avg", "max")


def _replicas(c: Call, group_size: int | None = None) -> tuple[int, int]:
    """How many ranks communicate, one device apart, which must be all of the module's."""
    ranks = int(c.attributes.get("ranks", 1))
    if ranks == 1:
        raise CannotMapError("the module is that of one rank; read it by rank_program, which takes how many there are")
    if group_size not in (None, ranks):
        raise CannotMapError(f"a group of {group_size} of the {ranks} ranks; only what all do together can be read")
    return ranks, 1


def _reduced(c: Call, collective: str, reduction: str, replicas: tuple[int, int], **axes: int) -> Ref:
    """A sum, mean or maximum over the ranks."""
    if reduction not in _REDUCTIONS:
        raise CannotMapError(f"the reduction {reduction}; the IR has {', '.join(_REDUCTIONS)}")
    op = "max" if reduction == "max" else "sum"
    result = c.op(collective, c.ref(0), op=op, replicas=replicas, **axes)
    return c.scaled(result, 1 / replicas[0]) if reduction == "avg" else result


def _all_reduce(c: Call) -> Ref:
    """x, reduction, name of the group."""
    return _reduced(c, "all_reduce", c.value("", 1), _replicas(c))


def _reduce_scatter(c: Call) -> Ref:
    """x, reduction, ranks of the group, its name; along the first axis."""
    return _reduced(c, "reduce_scatter", c.value("", 1), _replicas(c, int(c.value("", 2))), axis=0)


def _all_gather(c: Call) -> Ref:
    """x, ranks of the group, its name; along the first axis."""
    return c.op("all_gather", c.ref(0), axis=0, replicas=_replicas(c, int(c.value("", 1))))


def _all_to_all(c: Call) -> Ref:
    """x, sizes of what comes, sizes of what goes, name of the group; along the first axis."""
    sizes = {int(size) for position in (1, 2) for size in c.value("", position)}
    if len(sizes) != 1:
        raise CannotMapError("an all-to-all of unequal parts; the IR deals out equal ones")
    return c.op("all_to_all", c.ref(0), split_axis=0, concat_axis=0, replicas=_replicas(c))


def _waited(c: Call) -> Ref:
    """The result of a collective once it is there, which an instruction's always is."""
    return c.ref(0)


COMMUNICATION: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "_c10d_functional::all_reduce": _all_reduce,
        "_c10d_functional::reduce_scatter_tensor": _reduce_scatter,
        "_c10d_functional::all_gather_into_tensor": _all_gather,
        "_c10d_functional::all_to_all_single": _all_to_all,
        "_c10d_functional::wait_tensor": _waited,
    }
)
"""Rules by name of the op."""
