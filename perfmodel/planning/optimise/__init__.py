"""Optimises beyond enumeration: exact solvers, gradient relaxation, and certificates."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.planning.optimise._assign import Assignment, assign
    from perfmodel.planning.optimise._bandwidth import (
        BandwidthResult,
        bandwidth_problem,
        split_bandwidth,
    )
    from perfmodel.planning.optimise._choose import Chosen, choose_method, refine
    from perfmodel.planning.optimise._contiguous import (
        Cuts,
        NothingFitsError,
        least_critical_path,
        least_sum_plus_max,
    )
    from perfmodel.planning.optimise._cutting_planes import Bounded, convex_bound
    from perfmodel.planning.optimise._hardware import Design, Run, design_hardware
    from perfmodel.planning.optimise._partition import (
        PartitionResult,
        balanced,
        partition,
        partition_bound_s,
        partition_stages,
    )
    from perfmodel.planning.optimise._pipeline import (
        Certificate,
        passes_and_transfers_s,
        spread_bound_s,
    )
    from perfmodel.planning.optimise._relax import Relaxation, Relaxed, relax
    from perfmodel.planning.optimise._sizes import (
        BucketResult,
        Grouping,
        MicroBatchResult,
        by_micro_batch,
        launchable_buckets,
        size_buckets,
        size_micro_batches,
    )
    from perfmodel.planning.optimise._variables import Box, Choices, Shares, WholeShares

__getattr__, __dir__ = lazy_names(__name__)
