"""Groups of ranks: along the axes of a mesh, and as compiled modules write them."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.importers._rows import Groups


def axis_groups(sizes: Mapping[str, int], axes: Iterable[str]) -> Groups:
    """Ranks that differ along some axes of a mesh only, ranks counted with the last axis fastest.

    Raises:
        PerfModelError: an axis that the mesh does not have.
    """
    wanted = tuple(axes)
    if missing := [name for name in wanted if name not in sizes]:
        raise PerfModelError(f"mesh axis {missing[0]!r} is not among {', '.join(sizes)}")
    names = list(sizes)
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    order = [i for i, name in enumerate(names) if name not in wanted] + [names.index(name) for name in wanted]
    width = int(np.prod([sizes[name] for name in wanted]))
    return _rows(ranks.transpose(order).reshape(-1, width))


_BRACES: Final = re.compile(r"\{([\d,\s]*)\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(?\[([\d,]+)\](?:T\(([\d,]+)\))?\)?)?\s*\{([^}]*)\}")
_AXIS: Final = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def parse_groups(text: str, n_devices: int) -> Groups:
    """Replica groups in any of HLO's notations; none given means all devices together.

    `{{0,1},{2,3}}`; `[4,2]<=[2,4]T(1,0)`: 0 to 7 as 2 rows of 4, transposed, in 4 groups of 2; and
    `mesh['a'=2,'b'=4] {'b'}`, where `'b':(2)2` names a part of axis b, and `device_ids=([4,2]T(1,0))` may say, like an
    iota or as a list, which device stands where in the mesh.

    Raises:
        PerfModelError: another notation.
    """
    text = text.strip()
    if text in ("", "{}"):
        return (tuple(range(n_devices)),)
    if text.startswith("{"):
        return tuple(
            tuple(int(rank) for rank in group.split(",")) for group in _BRACES.findall(text[1:-1]) if group.strip()
        )
    if match := _IOTA.fullmatch(text):
        shape, base, order = (tuple(map(int, part.split(","))) if part else () for part in match.groups())
        ranks = np.arange(int(np.prod(base))).reshape(base)
        return _rows((ranks.transpose(order) if order else ranks).reshape(shape))
    if match := _MESH.fullmatch(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match.group(1))}
        device = _device_order(match.group(2), match.group(3), n_devices)
        return tuple(tuple(device[rank] for rank in group) for group in _mesh_groups(sizes, match.group(4)))
    raise PerfModelError(f"replica groups {text!r} are in a notation that is not known")


def _device_order(ids: str | None, order: str | None, n_devices: int) -> list[int]:
    """Device at each position of a mesh, row by row."""
    if ids is None:
        return list(range(n_devices))
    numbers = [int(n) for n in ids.split(",")]
    if order is None and sorted(numbers) == list(range(len(numbers))):
        return numbers
    axes = [int(n) for n in order.split(",")] if order else None
    return np.arange(int(np.prod(numbers))).reshape(numbers).transpose(axes).ravel().tolist()


def _mesh_groups(sizes: dict[str, int], axes: str) -> Groups:
    """Groups along axes, of which some may be parts: `'b':(m)k` has size k, and m is the product of the parts
    of 'b' before it (Shardy's sub-axis notation)."""
    split: dict[str, int] = {}
    wanted: list[str] = []
    parts = {name: (int(before), int(size)) for name, before, size in _AXIS.findall(axes) if before}
    for name, size in sizes.items():
        if name not in parts:
            split[name] = size
            continue
        before, part = parts[name]
        split |= {f"{name}:before": before, f"{name}:part": part, f"{name}:after": size // (before * part)}
    for name, before, _ in _AXIS.findall(axes):
        wanted.append(f"{name}:part" if before else name)
    return axis_groups(split, wanted)


def _rows(ranks: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ranks.tolist())
