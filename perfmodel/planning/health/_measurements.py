"""Measurements that distinguish causes, and the most informative of them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement that takes minutes, and its outcome under each cause."""

    name: str
    text: str
    outcomes: Mapping[str, str]
    """Outcome of the measurement by name of the cause; causes that are left out show nothing
    unusual."""
    effort_bits: float = 0.0
    """Additional information, in bits, that the measurement must give to be worth its effort,
    compared with the simplest one."""


MEASUREMENTS: Final = (
    Measurement(
        name="profile",
        text="profile one step on one rank, then run perfmodel explain --from SCRIPT --profile FILE",
        outcomes={
            "slow_inter_node_link": "long collectives between nodes",
            "slow_intra_node_link": "long collectives inside a node",
            "slow_rank": "collectives that wait",
            "low_clocks": "kernels all longer",
            "host_bound": "gaps between kernels",
            "blocking_launches": "gaps between kernels",
            "overlap_off": "collectives run after the kernels",
            "tp_overlap_off": "collectives run between the kernels",
            "full_recompute": "the forward pass runs twice",
            "unfused_attention": "softmax kernels",
            "data_loading": "idle before the first kernel",
        },
        effort_bits=0.5,
    ),
    Measurement(
        name="nccl_between_nodes",
        text="run all_reduce_perf of nccl-tests over the job's nodes, and compare its bus bandwidth with the network's",
        outcomes={"slow_inter_node_link": "low"},
    ),
    Measurement(
        name="nccl_inside_nodes",
        text="run all_reduce_perf of nccl-tests inside each node, and compare the nodes",
        outcomes={"slow_intra_node_link": "low"},
    ),
    Measurement(
        name="time_every_device",
        text="time one large matrix product on every device at the same time, and compare the devices",
        outcomes={"slow_rank": "one is slower", "low_clocks": "all are slow"},
    ),
    Measurement(
        name="print_arguments",
        text="print the settings that are really in effect, and compare them with the script",
        outcomes={
            "overlap_off": "another setting",
            "tp_overlap_off": "another setting",
            "full_recompute": "another setting",
            "unfused_attention": "another setting",
            "blocking_launches": "another setting",
        },
    ),
    Measurement(
        name="synthetic_data",
        text="run twenty steps on synthetic data",
        outcomes={
            "data_loading": "faster",
            "periodic_stalls": "no stalls",
            "irregular_stalls": "no stalls",
        },
    ),
    Measurement(
        name="no_checkpoints",
        text="run across two checkpoints with checkpoints switched off",
        outcomes={
            "checkpoints": "no stalls",
            "periodic_stalls": "the stalls stay or disappear",
        },
    ),
    Measurement(
        name="watch_clocks",
        text="record clocks, temperatures and throttle reasons of all devices over the run (nvidia-smi dmon)",
        outcomes={
            "slows_down": "clocks that fall",
            "slow_rank": "one device low",
            "low_clocks": "all devices low",
        },
    ),
)


_LOG_MORE: Final[Mapping[str, tuple[str, str]]] = {
    "megatron": ("--timing-log-level 1 --timing-log-option minmax", "--log-straggler"),
    "deepspeed": ('"wall_clock_breakdown": true', ""),
}
"""Settings by log format that make a log time the phases of a step, and report the clocks of
devices."""


def undecided_sentence(
    log_format: str, *, has_timers: bool, has_clocks: bool, batch_grows: bool
) -> str:
    """A sentence for several causes that the log cannot tell apart: why it cannot, and what to log
    in the next run.

    Args:
        log_format: one of `LOG_FORMATS`.
        has_timers: whether the log times phases of a step.
        has_clocks: whether the log reports the clocks of devices.
        batch_grows: whether the log has steps with several batch sizes.
    """
    because = "it only has step times"
    if has_timers or has_clocks or batch_grows:
        because = "its further figures fit several of them"
    for_timers, for_clocks = _LOG_MORE.get(log_format, ("", ""))
    settings = []
    if for_timers and not has_timers:
        settings.append(for_timers)
    if for_clocks and not has_clocks:
        settings.append(for_clocks)
    log_more = f". In the next run, set {' '.join(settings)} to log more" if settings else ""
    return f"this log cannot tell these causes apart, because {because}; the measurement below can{log_more}"


def most_telling(weight: Mapping[str, float]) -> Measurement:
    """The measurement expected to distinguish the causes best, or to confirm a single cause.

    Args:
        weight: weight of every cause, by its name.
    """
    # A single cause needs confirmation, not discrimination: take the simplest measurement that
    # shows it.
    if len(weight) == 1:
        (cause,) = weight
        confirming = [measurement for measurement in MEASUREMENTS if cause in measurement.outcomes]
        return min(confirming or MEASUREMENTS, key=lambda measurement: measurement.effort_bits)
    return max(
        MEASUREMENTS,
        key=lambda measurement: _bits(measurement, weight) - measurement.effort_bits,
    )


def _bits(measurement: Measurement, weight: Mapping[str, float]) -> float:
    """Entropy of the outcome: the information about the cause, as each cause has one outcome."""
    # Causes with equal outcomes cannot be told apart by this measurement: add their weights.
    by_outcome: dict[str, float] = defaultdict(float)
    total = sum(weight.values())
    for cause, value in weight.items():
        by_outcome[measurement.outcomes.get(cause, "")] += value / total
    return -sum(share * log2(share) for share in by_outcome.values() if share > 0)
