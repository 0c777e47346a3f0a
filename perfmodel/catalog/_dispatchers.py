"""Libraries that dispatch tokens to experts: multiprocessors that they hold, and rates that their authors published.

A TOML file has those of the dispatcher of its name; see the head of `data/dispatchers/hybridep.toml`.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from perfmodel.catalog._toml import checked, package_tables
from perfmodel.errors import PerfModelError


@dataclass(frozen=True, kw_only=True)
class ExchangeRates:
    """How fast tokens are exchanged over one class of links.

    Raises:
        PerfModelError: rates that are not one per number of parties, or that rise with these.
    """

    link: str
    """Class of the links, as collectives are filed under."""
    link_gb_per_s: float
    """Nominal rate of a link one way [1e9 bytes/s], which rates are relative to."""
    ranks_per_node: int = 0
    """Between nodes: ranks of each. 0: inside one."""
    parties: tuple[int, ...]
    """Ranks inside a node, or nodes."""
    dispatch_gb_per_s: tuple[float, ...]
    combine_gb_per_s: tuple[float, ...]
    """Bytes that a rank receives, its own included, over the time [1e9 bytes/s]; between nodes those that it sends to
    nodes, its own included."""

    def __post_init__(self) -> None:
        for rates in (self.dispatch_gb_per_s, self.combine_gb_per_s):
            falls = all(after <= before for before, after in pairwise(rates))
            if len(rates) != len(self.parties) or not falls or list(self.parties) != sorted(set(self.parties)):
                raise PerfModelError(
                    f"exchange rates over {self.link}: one per number of parties that rises, none higher"
                )


@dataclass(frozen=True, kw_only=True)
class ExchangeLibrary:
    """What is known of a dispatcher's kernels."""

    source: str = ""
    multiprocessors: int = 0
    """That they hold as training frameworks call them; 0: not known."""
    rate: tuple[ExchangeRates, ...] = ()
    """Published rates; empty where there are none."""


@cache
def exchange_library(dispatcher: str) -> ExchangeLibrary:
    """The library of a dispatcher of this name; one of which nothing is known where it has none of its own."""
    name = f"{dispatcher}.toml"
    return checked(ExchangeLibrary, package_tables("dispatchers").get(name, {}), name)
