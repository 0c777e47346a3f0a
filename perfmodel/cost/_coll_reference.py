"""Collectives on one cluster: constants of its links, measured corrections, and what is known of it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from perfmodel.cost._alpha_beta import Groups, Tiers, share_between_nodes
from perfmodel.learn import (
    CollectiveWeights,
    LinkConstants,
    ReferenceVectors,
    collective_curve,
    reference_vectors,
)
from perfmodel.spec import Cluster


@dataclass(frozen=True)
class Reference:
    """One collective kind on one cluster."""

    kind: str
    tiers: Tiers
    found: ReferenceVectors

    @classmethod
    def of(cls, weights: CollectiveWeights, kind: str, cluster: Cluster) -> "Reference":
        """Look up what the fits say of the cluster's device and network levels."""
        names = (cluster.device.name, *cluster.device.aliases)
        levels = tuple(level.name for level in cluster.levels)
        return cls(kind, Tiers.of(cluster), reference_vectors(weights, kind, names, levels))

    def times(self, groups: Groups) -> tuple[Float64[np.ndarray, "n"], np.ndarray]:
        """Time [s] and provenance of every group; inside a node with the measured correction."""
        curve_s = np.asarray(
            collective_curve(
                self.kind, groups.buffer_bytes, groups.ranks, groups.ranks_per_node, self.constants(groups)
            )
        )
        inside = groups.ranks <= groups.ranks_per_node
        fix = self.found.correction(groups.ranks, np.log2(np.maximum(groups.buffer_bytes, 1.0)))
        time_s = curve_s * np.exp(np.where(inside, fix, 0.0))
        return time_s * (groups.ranks > 1), self._provenance(groups, inside)

    def constants(self, groups: Groups) -> LinkConstants:
        """Constants of the curve for every group: fitted efficiencies on the cluster's stated figures."""
        tiers, inter = self.tiers, self.found.inter
        base = LinkConstants.from_vector(self.found.intra)
        efficiency = np.exp(inter[:, 4]) / tiers.nominal_bandwidth
        fitted_hops = np.exp(inter[:, 2])
        if not tiers.flat:
            fitted_hops[0] = base.hop_intra_s
        hops = tiers.hops(fitted_hops)
        return LinkConstants(
            launch_s=base.launch_s,
            hop_intra_s=hops[0],
            hop_inter_s=hops[groups.level],
            bandwidth_intra=base.bandwidth_intra * tiers.stated_bandwidth[0] / tiers.nominal_bandwidth[0],
            bandwidth_inter=share_between_nodes(groups, tiers) * efficiency[groups.level],
            low_latency_share=base.low_latency_share,
            bandwidth_hop_ratio=base.bandwidth_hop_ratio,
            peer_exponent=base.peer_exponent,
        )

    def _provenance(self, groups: Groups, inside: np.ndarray) -> np.ndarray:
        found, size = self.found, groups.buffer_bytes
        exact = inside & np.isin(groups.ranks, found.ranks)
        exact &= (size >= found.low_bytes) & (size <= found.high_bytes)
        result = np.full(len(size), "extrapolated", dtype=object)
        result[groups.ranks <= found.most_ranks_between] = "analytical"
        if found.most_ranks_inside:
            result[inside & (groups.ranks <= found.most_ranks_inside)] = "learned"
        else:
            result[inside] = "analytical"
        result[exact | (groups.ranks <= 1)] = "measured"
        return result
