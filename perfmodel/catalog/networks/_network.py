"""The network between nodes: adapters, rates, kind."""

from dataclasses import dataclass, replace
from typing import Final, Literal

Scope = Literal["node", "device", "rack"]
NETWORK_WORDS: Final = "write it like '8x 400 Gb/s InfiniBand NDR per node' (b is bits, B bytes; perfmodel.catalog.read_network)"
INFINIBAND_GBIT: Final = {
    "SDR": 10,
    "DDR": 20,
    "QDR": 40,
    "FDR": 56,
    "EDR": 100,
    "HDR": 200,
    "NDR": 400,
    "XDR": 800,
    "GDR": 1600,
}
"""Gbit/s of a link of four lanes by generation (InfiniBand Trade Association, roadmap)."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between nodes, as described in words."""

    family: str = ""
    """`InfiniBand`, `RoCE`, `AWS EFA` and so on; empty if no word names one."""
    generation: str = ""
    """Generation of InfiniBand (`NDR`), Slingshot (`11`) or EFA (`v2`); empty if unknown."""
    adapters: int | None = None
    """Adapters of a node, device or rack (see `scope`). None if not stated: the rate then belongs
    to the whole node, or to the single adapter of a device."""
    gbit_per_s: float | None = None
    """One-way rate of an adapter, or of a whole node if `adapters` is None and `scope` is `node`;
    None if not stated."""
    scope: Scope = "node"
    """Whether a node, a rack or a single device has these adapters and this rate."""
    is_adapter_rate: bool = False
    """Whether the rate may be that of one adapter among several, because the words state neither
    their number nor whose rate it is."""
    absent: bool = False
    """Whether the words say that there is none: a single node."""
    domain: int = 0
    """Devices of the named NVLink rack (`NVL72`); 0 if none is named."""
    not_understood: tuple[str, ...] = ()
    """Words that the grammar does not know, which were ignored."""
    other_counts: tuple[int, ...] = ()
    """Numbers of adapters that the words give to other networks: storage, management, Ethernet
    beside InfiniBand."""
    other_gbit_per_s: tuple[float, ...] = ()
    """Rates that the words give to other networks."""

    @property
    def name(self) -> str:
        """Family and generation, by their names in tables of measured collectives."""
        # Its maker writes Slingshot-11, all others put a blank.
        sign = "-" if self.family == "Slingshot" else " "
        return f"{self.family}{sign}{self.generation}" if self.generation else self.family

    @property
    def words(self) -> str:
        """Describe the network in words from which the same network is read again."""
        # The grammar reads this text back to the same record (tests check that).
        rack = f"NVL{self.domain}, " if self.domain else ""
        if self.absent:
            return f"{rack}none (one node)"
        if self.gbit_per_s is None:
            counted = f"{self.adapters}x {self.name}" if self.adapters else self.name
            return f"{rack}{counted}".strip().removesuffix(",")
        rate = f"{self.gbit_per_s:.12g} Gb/s"
        if self.adapters is not None:
            scope = self.scope
            rate = f"{self.adapters}x {rate}"
        else:
            scope = "adapter" if self.scope == "device" else self.scope
        return f"{rack}{rate} {self.name}".rstrip() + (
            "" if self.is_adapter_rate else f" per {scope}"
        )

    def gbit_per_s_per_device(
        self, devices_per_node: int, devices_per_rack: int = 0
    ) -> float | None:
        """Rate per device when all communicate; None if not stated.

        Each device has the same whole number of adapters; the rest of a node's adapters serve
        storage.

        Args:
            devices_per_node: devices that share the adapters of a node (of a tray, in a rack of
                NVLink).
            devices_per_rack: devices that share a rate that is stated per rack.
        """
        if self.gbit_per_s is None:
            return None
        adapters = 1 if self.adapters is None else self.adapters
        if self.scope == "device":
            return adapters * self.gbit_per_s
        sharing = devices_per_node if self.scope == "node" else devices_per_rack or devices_per_node
        # 10 adapters for 8 devices: two of them serve storage and management.
        if adapters > sharing:
            adapters -= adapters % sharing
        return adapters * self.gbit_per_s / sharing

    @property
    def detail(self) -> int:
        """Rank of what is known about the rate: 2 if adapters are counted, 1 if only the rate is
        known, else 0."""
        if self.gbit_per_s is None:
            return 0
        return 1 if self.adapters is None else 2

    def without_others(
        self, count: int | None, gbit_per_s: float | None
    ) -> tuple[int | None, float | None]:
        """Figures from columns of adapters, None for those that the words give to another network
        and not to this one."""
        if count in self.other_counts and count != self.adapters:
            count = None
        if gbit_per_s in self.other_gbit_per_s and gbit_per_s != self.gbit_per_s:
            gbit_per_s = None
        return count, gbit_per_s

    def with_adapters(self, count: int | None, gbit_per_s: float | None) -> "Network":
        """Set the adapters of a node from numbers, which override words.

        Numbers that repeat those in the words (`3x 100 GbE per card`, 3, 100) change nothing, and
        neither do those that the words give to another network (`storage: 2x ...`, 2).
        """
        count, gbit_per_s = self.without_others(count, gbit_per_s)
        repeats = self.gbit_per_s is not None and count in (None, self.adapters)
        if (count is None and gbit_per_s is None) or (
            repeats and gbit_per_s in (None, self.gbit_per_s)
        ):
            return self
        changed = replace(self, is_adapter_rate=False)
        counted_per_node = self.adapters is not None and self.scope == "node"
        if gbit_per_s is None:
            # A count alone: it divides a rate of the whole node, and leaves that of one adapter as
            # it is. EFA's rate is the whole instance's, however many cards carry it.
            if self.gbit_per_s is None or self.family == "AWS EFA":
                return replace(changed, adapters=count, scope="node")
            is_total = self.scope != "device" and self.adapters is None
            gbit_per_adapter = self.gbit_per_s / count if is_total and count else self.gbit_per_s
            return with_generation(
                replace(changed, adapters=count, gbit_per_s=gbit_per_adapter, scope="node")
            )
        if count is None:
            # A rate alone is that of the adapters which the words count, else of each device's own.
            count = self.adapters
            scope: Scope = "node" if counted_per_node else "device"
            return with_generation(
                replace(changed, adapters=count, gbit_per_s=gbit_per_s, scope=scope)
            )
        return with_generation(
            replace(changed, adapters=count, gbit_per_s=gbit_per_s, scope="node")
        )


def with_generation(network: Network) -> Network:
    """InfiniBand with the generation implied by its adapters' rate, if none is named."""
    if network.family != "InfiniBand" or network.generation:
        return network
    if network.gbit_per_s is None or (network.adapters is None and network.scope == "node"):
        return network
    # No two generations have the same rate, so the rate determines the generation.
    by_rate = {rate: generation for generation, rate in INFINIBAND_GBIT.items()}
    return replace(network, generation=by_rate.get(round(network.gbit_per_s), ""))
