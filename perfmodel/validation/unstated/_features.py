"""Features of a run that are always known; priors of its choices depend on them."""

import re
from dataclasses import dataclass, replace
from typing import Final

from perfmodel.catalog.networks import DEVICES_PER_NODE
from perfmodel.spec import Cluster, Device, Framework, Model, Transformer
from perfmodel.validation.rows import Case
from perfmodel.validation.unstated.priors import EVERYWHERE
from perfmodel.workload import parameter_count

_SIZES_B: Final = (2.0, 15.0, 50.0, 150.0)
"""Billions of parameters between classes of models."""
_LENGTHS: Final = (768, 3072, 12288)
"""Tokens between classes of sequences."""
_NODES: Final = (8, 64)
"""Nodes between classes of machines, of `DEVICES_PER_NODE` each."""
_ERAS: Final = (2022, 2024)
"""Last years of all eras but the newest: before fused attention was usual, and before products of 8 bits were."""


@dataclass(frozen=True, kw_only=True)
class RunFeatures:
    """Classes of a run."""

    framework: str
    """Name of the framework without the year."""
    kind: str
    """`cnn`, `encoder`, `dense` or `moe`."""
    size: str
    """Class by parameters."""
    length: str
    """Class by tokens of a sequence."""
    era: str
    """Class by year; empty where no year is known."""
    vendor: str
    architecture: str
    """Architecture of the device, as `vendor` is of the device."""
    stages: str = ""
    """`pipeline` or `one stage`."""
    scale: str = ""
    """Class by devices (`scale_of`)."""
    fabric: str = ""
    """Kind of the network between nodes: `InfiniBand`, `Ethernet`, `cloud` or `other`; empty where it is not named."""

    def contexts(self, chain: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """Contexts along a chain of known features, starting with the context of all runs."""
        # A feature that is not known drops its context, so that the chain falls back to the more
        # general ones.
        contexts = [EVERYWHERE]
        for names in chain:
            values = [getattr(self, name) for name in names]
            if all(values):
                contexts.append(", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)))
        return tuple(contexts)


def model_features(model: Model, device: Device, seq_len: int, framework: Framework, year: int | None) -> RunFeatures:
    """Features of a run without a known layout. The default year is that of the framework's version."""
    known_year = year or framework.since or None
    return RunFeatures(
        framework=framework.name,
        kind=kind_of(model),
        size=_class_of(parameter_count(model) / 1e9, _SIZES_B, "B"),
        length=_class_of(seq_len, _LENGTHS, " tokens"),
        era="" if known_year is None else _class_of(known_year, _ERAS, ""),
        vendor=device.vendor,
        architecture=device.architecture,
    )


def case_features(case: Case, year: int | None) -> RunFeatures:
    """Features of a completed run."""
    features = model_features(case.model, case.cluster.device, case.job.seq_len, case.framework, year)
    stages = "pipeline" if case.layout.pp > 1 else "one stage"
    scale = scale_of(case.layout.devices)
    return replace(features, stages=stages, scale=scale, fabric=fabric_of(case.cluster))


def scale_of(devices: int) -> str:
    """Class of a machine by what it costs to run, in nodes of `DEVICES_PER_NODE`.

    Racks of NVLink and slices of TPUs count as the nodes that as many devices would make: people try as hard with 64
    devices of one rack as with those of eight nodes.
    """
    return _class_of(-(-devices // DEVICES_PER_NODE), _NODES, " nodes")


_FABRICS: Final = (
    ("InfiniBand", r"infiniband|\bib\b|\b[ehnx]dr\b|quantum|connectx|\bcx-?\d"),
    ("Ethernet", r"ethernet|gbe\b|roce|rdma|tcp"),
    ("cloud", r"\befa\b|gpudirect|gve|\bdcn\b"),
)
"""Words for kinds of networks; the first that matches counts."""


def fabric_of(cluster: Cluster) -> str:
    """Kind of the network between nodes, by its name."""
    # A cluster of one level has no network between nodes; `scale-out network` stands for one that
    # the run does not name.
    name = cluster.levels[-1].name.lower()
    if len(cluster.levels) < 2 or name == "scale-out network":
        return ""
    return next((fabric for fabric, pattern in _FABRICS if re.search(pattern, name)), "other")


def kind_of(model: Model) -> str:
    """Kind of network."""
    if not isinstance(model, Transformer):
        return "cnn"
    if model.experts is not None:
        return "moe"
    return "dense" if model.attention.causal else "encoder"


def _class_of(value: float, bounds: tuple[float, ...], unit: str) -> str:
    """Name of the class of a value, such as `2 to 15B`; bounds belong to the class below them."""
    above = [bound for bound in bounds if bound < value]
    below = [bound for bound in bounds if bound >= value]
    if not above:
        return f"up to {bounds[0]:g}{unit}"
    if not below:
        return f"above {bounds[-1]:g}{unit}"
    return f"{above[-1]:g} to {below[0]:g}{unit}"
