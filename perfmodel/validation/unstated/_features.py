"""Features of a run that are always known; priors of its choices depend on them."""

import re
from dataclasses import dataclass, replace
from typing import Final

from perfmodel.catalog.networks import DEVICES_PER_NODE
from perfmodel.spec import Cluster, Device, Framework, Model, Transformer
from perfmodel.units import dtype_bytes
from perfmodel.validation.rows import Case
from perfmodel.validation.unstated.priors import EVERYWHERE
from perfmodel.workload import parameter_count, parameters

_SIZES_B: Final = (2.0, 15.0, 50.0, 150.0)
"""Bounds between classes of models, in billions of parameters."""
_LENGTHS: Final = (768, 3072, 12288)
"""Bounds between classes of sequences, in tokens."""
_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2.0, 4.0, 12.0
_BYTES_PER_ELEMENT: Final = 34.0
_NODES: Final = (8, 64)
"""Bounds between classes of machines, in nodes of `DEVICES_PER_NODE` devices."""
LARGEST_SCALE: Final = f"above {_NODES[-1]} nodes"
"""The class of the largest machines, whose runs cost most (`scale_of`)."""
_NEEDS: Final = (0.25, 0.5, 1.0, 2.0)
"""Bounds between classes of memory needed without recomputation, as shares of a device's memory."""
_ERAS: Final = (2022, 2024)
"""Last years of all eras but the newest: before fused attention was usual, and before products of 8
bits were."""


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
    """Class by year; empty if no year is known."""
    vendor: str
    architecture: str
    """Architecture of the device."""
    stages: str = ""
    """`pipeline` or `one stage`."""
    scale: str = ""
    """Class by devices (`scale_of`)."""
    need: str = ""
    """Class by the share of a device's memory that a run needs without recomputation
    (`need_of`)."""
    fabric: str = ""
    """Kind of the network between nodes: `InfiniBand`, `Ethernet`, `cloud` or `other`; empty where
    it is not named."""

    def contexts(self, chain: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
        """Contexts along a chain of known features, starting with the context of all runs."""
        # A feature that is not known drops its context, so that the chain falls back to the more
        # general ones.
        contexts = [EVERYWHERE]
        for names in chain:
            values = [getattr(self, name) for name in names]
            if all(values):
                contexts.append(
                    ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
                )
        return tuple(contexts)


def model_features(
    model: Model, device: Device, seq_len: int, framework: Framework, year: int | None
) -> RunFeatures:
    """Features of a run without a known layout. Default year: that of the framework."""
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
    features = model_features(
        case.model, case.cluster.device, case.job.seq_len, case.framework, year
    )
    stages = "pipeline" if case.layout.pp > 1 else "one stage"
    scale = scale_of(case.layout.devices)
    return replace(
        features, stages=stages, scale=scale, fabric=fabric_of(case.cluster), need=need_of(case)
    )


def need_of(case: Case) -> str:
    """Class by the memory needed without recomputation, relative to the devices' memory.

    Empty but for training of transformers. By closed forms, as a class needs no more: weights in 16
    bits (frozen ones in as many as products read), gradients, and three fp32 states of the
    optimizer (ZeRO, arXiv 1910.02054, section 3), of which stages of ZeRO divide some; and 34 bytes
    of activations per token, element and layer (Korthikanti et al., arXiv 2205.05198, equation 2,
    with fused attention), of as many micro-batches as a pipeline of that depth has in flight.
    """
    model, layout, job = case.model, case.layout, case.job
    if not isinstance(model, Transformer) or job.mode != "train":
        return ""
    ranks = layout.dp * layout.cp
    experts_tp = layout.etp or layout.tp
    counted = parameters(model)
    frozen = job.fine_tuning.frozen
    weight_bytes = dtype_bytes(job.dtype) if frozen and job.narrow.fp8_params else _WEIGHT_BYTES

    # Experts lie on other ranks than the rest, and are divided over those that hold the same ones.
    states_bytes = 0.0
    for params, shards, replicas in (
        (counted.total - counted.experts, layout.tp, ranks),
        (
            counted.experts,
            layout.ep * experts_tp,
            max(1.0, ranks * layout.tp / (layout.ep * experts_tp)),
        ),
    ):
        per_param = weight_bytes / (replicas if layout.zero >= 3 else 1.0)
        if not frozen:
            per_param += _GRADIENT_BYTES / (replicas if layout.zero >= 2 else 1.0)
            per_param += _OPTIMIZER_BYTES / (replicas if layout.zero >= 1 else 1.0)
        states_bytes += params / (shards * layout.pp) * per_param

    tokens = layout.micro_batch * job.seq_len / (layout.tp * layout.cp)
    activation_bytes = _BYTES_PER_ELEMENT * tokens * model.hidden * model.layers
    return _class_of(
        (states_bytes + activation_bytes) / case.cluster.device.memory_bytes, _NEEDS, " of memory"
    )


def scale_of(devices: int) -> str:
    """Class of a machine by its cost, measured in nodes of `DEVICES_PER_NODE`.

    Racks of NVLink and slices of TPUs count as the nodes that as many devices would make: people
    try as hard with 64 devices of one rack as with those of eight nodes.
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
