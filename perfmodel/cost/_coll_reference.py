"""Collectives on one cluster: constants of its links, measured corrections, and what is known of it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from perfmodel.cost._alpha_beta import Groups, share_between_nodes, shifted_hops
from perfmodel.learn import (
    CollectiveWeights,
    LinkConstants,
    ReferenceVectors,
    collective_curve,
    link_class,
    reference_vectors,
)
from perfmodel.spec import Cluster


@dataclass(frozen=True)
class Reference:
    """One collective kind on one cluster."""

    kind: str
    cluster: Cluster
    found: ReferenceVectors

    @classmethod
    def of(cls, weights: CollectiveWeights, kind: str, cluster: Cluster) -> "Reference":
        """Look up what the fits say of the cluster's device and network levels."""
        names = (cluster.device.name, *cluster.device.aliases)
        levels = tuple(level.name for level in cluster.levels)
        return cls(kind, cluster, reference_vectors(weights, kind, names, levels))

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
        cluster, device = self.cluster, self.cluster.device.name
        nominal = np.array(
            [link_class(level.name, device, i > 0).bandwidth_bytes_per_s for i, level in enumerate(cluster.levels)]
        )
        base = LinkConstants.from_vector(self.found.intra)
        efficiency = np.exp(self.found.inter[:, 4]) / nominal
        fitted_hops = np.concatenate([[base.hop_intra_s], np.exp(self.found.inter[1:, 2])])
        hops = shifted_hops(cluster, fitted_hops)
        stated = cluster.levels[0].bandwidth_bytes_per_s / nominal[0]
        return LinkConstants(
            launch_s=base.launch_s,
            hop_intra_s=hops[0],
            hop_inter_s=hops[groups.level],
            bandwidth_intra=base.bandwidth_intra * stated,
            bandwidth_inter=share_between_nodes(groups, cluster) * efficiency[groups.level],
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
