"""The model card of collective weights, as Markdown."""

from collections.abc import Mapping

import numpy as np

from perfmodel.learn._collective_curve import LinkConstants
from perfmodel.learn._collective_weights import CollectiveWeights

_INTRO = """# Model card: collectives

Time of all_reduce, all_gather, reduce_scatter, all_to_all, send_recv and broadcast, and of mixture-of-experts
dispatch and combine. Three layers: a physical curve (ring or double binary tree, low-latency or bandwidth
protocol, inside and between nodes) with eight constants per measured series; a pooled Flax network per kind,
shrunk by what it is worth on devices left out; kriging of what remains over sizes, rank counts, dtypes,
library versions, kinds and devices. Intervals are conformal: from shapes left out where measured, from rank
counts and devices left out elsewhere.

Not to be used for: networks with contention from other jobs, topologies that a per-device bandwidth does not
describe, collectives that overlap compute (price that apart). Between nodes the licensed tables hold few
healthy fabrics; bandwidth there is an efficiency of the stated line rate and latency the stated one.
"""


def collective_card(weights: CollectiveWeights, hashes: Mapping[str, str]) -> str:
    """Tables and hashes, errors on shapes left out, shrinkages, interval widths, constants of the references."""
    notes = weights.notes
    text = [_INTRO, f"Rows: {notes['rows']} collectives, {notes['exchange_rows']} exchanges. Seed {notes['seed']}."]
    text += ["", "| table | SHA-256 (first 16) |", "|---|---|"]
    text += [f"| {name} | `{digest}` |" for name, digest in hashes.items()]
    text += ["", "| family | points | mean error on shapes left out |", "|---|--:|--:|"]
    for name, corrected in {**weights.corrections, **weights.moe.corrections}.items():
        points = len(corrected.kriging.weight)
        text.append(f"| {name.replace('|', ' ')} | {points} | {100 * corrected.left_out_error:.1f} % |")
    text += ["", "| kind | network shrinkage | 90 % factor, ranks left out | 90 % factor, devices left out |"]
    text.append("|---|--:|--:|--:|")
    for kind, net in weights.nets.items():
        factors = [np.exp(weights.spread_of(out, kind)) for out in ("ranks", "device")]
        text.append(f"| {kind} | {net.shrinkage:.2f} | {factors[0]:.2f} | {factors[1]:.2f} |")
    text += ["", "Constants of the reference series (what clusters are priced with):", ""]
    text += ["| series | launch us | hop us | GB/s to 7 peers | peer exponent |", "|---|--:|--:|--:|--:|"]
    for series in weights.series:
        if series.name in weights.grids:
            c = LinkConstants.from_vector(series.vector)
            text.append(
                f"| {series.name.replace('|', ' ')} | {1e6 * c.launch_s:.1f} | {1e6 * c.hop_intra_s:.2f} | "
                f"{c.bandwidth_intra / 1e9:.0f} | {c.peer_exponent:.2f} |"
            )
    return "\n".join(text) + "\n"
