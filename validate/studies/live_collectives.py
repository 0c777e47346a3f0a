"""Collectives for live validation: more ranks than were calibrated, placed within and between hosts, in rings and in
two levels."""

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from perfmodel.program.ir import Program, parse_function, undistributed

Algorithm = Literal["ring", "hierarchical", "inside", "across"]
_SIZES: Final = (524288, 2097152)
"""Bytes of a rank's buffer."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """One way to sum buffers of all ranks, or of all ranks of smaller groups."""

    algorithm: Algorithm
    """`ring`: one all-reduce of all ranks. `hierarchical`: reduce-scatter within every host, all-reduce of each
    slice between the hosts, all-gather within every host (Cho et al. 2019, section 2). `inside`: one all-reduce per
    host. `across`: one all-reduce per place within the hosts, all of which share the hosts' links."""
    ranks: int
    ranks_per_host: int
    bytes: int

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host

    @property
    def name(self) -> str:
        per_host = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)} a host"
        return f"{self.algorithm} all-reduce of {self.bytes // 1024} KiB, {self.ranks} ranks, {per_host}"

    def program(self) -> Program:
        """Calls of the ranks' collectives; every group's in turn of the list, all groups at the same time."""
        body = {"ring": self._ring, "hierarchical": self._hierarchical, "inside": self._inside, "across": self._across}
        lines, results = body[self.algorithm]()
        elements = self.bytes // 4
        parameters = ", ".join(f"%x{r}: fp32[{elements}] @{r}" for r in range(self.ranks))
        text = [f"func @{self.algorithm}({parameters}) {{", *lines, f"  return {', '.join(results)}", "}"]
        return undistributed(parse_function("\n".join(text)))

    def _groups_inside(self) -> list[list[int]]:
        return [list(range(h * self.ranks_per_host, (h + 1) * self.ranks_per_host)) for h in range(self.hosts)]

    def _groups_across(self) -> list[list[int]]:
        return [list(range(place, self.ranks, self.ranks_per_host)) for place in range(self.ranks_per_host)]

    def _ring(self) -> tuple[list[str], list[str]]:
        return _calls("all_reduce", "x", "y", [list(range(self.ranks))])

    def _inside(self) -> tuple[list[str], list[str]]:
        return _calls("all_reduce", "x", "y", self._groups_inside())

    def _across(self) -> tuple[list[str], list[str]]:
        return _calls("all_reduce", "x", "y", self._groups_across())

    def _hierarchical(self) -> tuple[list[str], list[str]]:
        scattered, _ = _calls("reduce_scatter", "x", "s", self._groups_inside(), " {axis=0}")
        reduced, _ = _calls("all_reduce", "s", "t", self._groups_across())
        gathered, results = _calls("all_gather", "t", "y", self._groups_inside(), " {axis=0}")
        return [*scattered, *reduced, *gathered], results


def _calls(
    op: str, source: str, target: str, groups: list[list[int]], attributes: str = ""
) -> tuple[list[str], list[str]]:
    """A line per group, and the names of the results."""

    def names(prefix: str, group: list[int]) -> str:
        return ", ".join(f"%{prefix}{rank}" for rank in group)

    lines = [f"  {names(target, group)} = {op}({names(source, group)}){attributes}" for group in groups]
    return lines, [f"%{target}{rank}" for group in groups for rank in group]


def collective_cases() -> list[CollectiveCase]:
    """None of them on two ranks, which is what the calibration has."""
    shapes: list[tuple[Algorithm, int, int]] = [
        ("ring", 4, 1), ("ring", 8, 1), ("ring", 4, 2), ("ring", 8, 4), ("hierarchical", 4, 2),
        ("hierarchical", 8, 4), ("hierarchical", 8, 2), ("inside", 4, 2), ("across", 4, 2),
    ]  # fmt: skip
    return [
        CollectiveCase(algorithm=algorithm, ranks=ranks, ranks_per_host=per_host, bytes=size)
        for (algorithm, ranks, per_host), size in product(shapes, _SIZES)
    ]
