"""Conversions between shardings, each by one collective (GSPMD, Xu et al. 2021, section 4.2)."""

from collections.abc import Sequence

from perfmodel.program.ir import Instruction, Partial, Replicated, Sharded, Sharding, Tag, Tensor, attributes

Names = tuple[str, ...]


def conversion(
    parts: Sequence[str],
    whole: Tensor,
    current: Sharding,
    target: Sharding,
    hint: str,
    tag: Tag,
    replicas: tuple[int, int] | None = None,
) -> tuple[list[Instruction], Names]:
    """Instructions that bring a value from one sharding to another, and the new parts.

    Args:
        parts: the value's parts, in the order of the slices.
        whole: type of the whole value.
        current: how it is spread.
        target: how it is to be; never `Partial`, which nothing needs.
        hint: new part j is named hint + str(j).
        tag: tag of the instructions.
        replicas: where only the first part is written down, how many there are and how many devices apart.
    """
    n = replicas[0] if replicas else len(parts)
    names = tuple([f"{hint}{j}" for j in range(len(parts))])

    def together(collective: str, **values: object) -> tuple[list[Instruction], Names]:
        values |= {"replicas": replicas} if replicas else {}
        return [Instruction(collective, tuple(parts), names, attributes(**values), tag)], names

    match current, target:
        case Partial(op), Replicated():
            return together("all_reduce", op=op)
        case Partial("sum"), Sharded(axis):
            return together("reduce_scatter", axis=axis)
        case Partial(), Sharded():
            reduced, whole_parts = conversion(parts, whole, current, Replicated(), f"{hint}whole", tag, replicas)
            cut, names = conversion(whole_parts, whole, Replicated(), target, hint, tag, replicas)
            return reduced + cut, names
        case Sharded(axis), Replicated():
            return together("all_gather", axis=axis)
        case Sharded(old), Sharded(new):
            return together("all_to_all", concat_axis=old, split_axis=new)
        case Replicated(), Sharded(axis):
            size = whole.shape[axis] // n
            cuts = [attributes(axis=axis, start=j * size, stop=(j + 1) * size) for j in range(len(parts))]
            here = Tag(tag.phase, tag.layer, tag.micro_batch)
            return [Instruction("slice", (parts[j],), (names[j],), cuts[j], here) for j in range(len(parts))], names
    raise ValueError(f"no conversion from {current} to {target}")
