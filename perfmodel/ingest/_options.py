"""What a file's reader cannot know and its user can."""

import re
from dataclasses import dataclass
from typing import Final, get_args

from perfmodel import catalog
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ops import CollectiveKind

COLLECTIVES: Final = get_args(CollectiveKind)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Said by the user; a file that says otherwise is refused only where the two cannot both hold."""

    device: str = ""
    """Name for the `device` column instead of the one in the file."""
    ranks: int | None = None
    """Ranks that took part in the collectives of files that do not say."""
    ranks_per_node: int | None = None
    collective: str = ""
    """Kind of logs that do not print the program's name, as in the tables (all_to_all)."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PerfModelError(f"{name} must be at least 1, got {value}")
        if self.collective and self.collective not in COLLECTIVES:
            raise UnknownNameError("collective", self.collective, COLLECTIVES)

    def nodes(self, ranks: int) -> dict[str, int]:
        """The columns of where a group of so many ranks lies, if the user says how many share a node."""
        if self.ranks_per_node is None:
            return {}
        per_node = min(self.ranks_per_node, ranks)
        return {"num_nodes": -(-ranks // per_node), "ranks_per_node": per_node}

    def name_of(self, reported: str) -> str:
        """The device's name: as the user says, else the catalog's for what was reported, else as reported."""
        return self.device or _catalog_name(reported.strip())


_FORMS: Final = (
    (re.compile(r"A100-SXM(?:4)?-(40|80)GB", re.I), "A100-SXM4-{}GB"),
    (re.compile(r"A100-PCIE-(40|80)GB|A100 (80)GB PCIe", re.I), "A100-PCIE-{}GB"),
    (re.compile(r"H100 80GB HBM3", re.I), "H100-SXM5-80GB"),
    (re.compile(r"H100 PCIe", re.I), "H100-PCIE-80GB"),
    (re.compile(r"H100 NVL", re.I), "H100-NVL-94GB"),
    (re.compile(r"\bH200$", re.I), "H200-SXM-141GB"),
    (re.compile(r"\bB200$", re.I), "B200-SXM-180GB"),
    (re.compile(r"GH200 (?:480|120)GB|GH200-96GB", re.I), "GH200-96GB"),
    (re.compile(r"V100-SXM2-(16|32)GB", re.I), "V100-SXM2-{}GB"),
    (re.compile(r"V100-PCIE-(16|32)GB", re.I), "V100-PCIE-{}GB"),
)
"""How drivers name the boards that the catalog names otherwise."""


def _catalog_name(reported: str) -> str:
    for form, name in _FORMS:
        if found := form.search(reported):
            return name.format(next((g for g in found.groups() if g), ""))
    plain = re.sub(r"^(NVIDIA|AMD|Tesla)\s+(GeForce\s+|Instinct\s+|Tesla\s+)?", "", reported)
    try:
        return catalog.device(plain).name if plain else ""
    except UnknownNameError:
        return reported
