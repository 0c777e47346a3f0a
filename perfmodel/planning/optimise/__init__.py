"""The best of what enumeration cannot reach: exact solvers, gradient relaxation, and certificates."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.optimise._assign import Assignment as Assignment
from perfmodel.planning.optimise._assign import assign as assign
from perfmodel.planning.optimise._bandwidth import BandwidthResult as BandwidthResult
from perfmodel.planning.optimise._bandwidth import bandwidth_problem as bandwidth_problem
from perfmodel.planning.optimise._bandwidth import split_bandwidth as split_bandwidth
from perfmodel.planning.optimise._buckets import BucketResult as BucketResult
from perfmodel.planning.optimise._buckets import size_buckets as size_buckets
from perfmodel.planning.optimise._choose import Chosen as Chosen
from perfmodel.planning.optimise._choose import choose_method as choose_method
from perfmodel.planning.optimise._choose import refine as refine
from perfmodel.planning.optimise._contiguous import Cuts as Cuts
from perfmodel.planning.optimise._contiguous import NothingFitsError as NothingFitsError
from perfmodel.planning.optimise._contiguous import least_critical_path as least_critical_path
from perfmodel.planning.optimise._contiguous import least_sum_plus_max as least_sum_plus_max
from perfmodel.planning.optimise._cutting_planes import Bounded as Bounded
from perfmodel.planning.optimise._cutting_planes import convex_bound as convex_bound
from perfmodel.planning.optimise._hardware import Design as Design
from perfmodel.planning.optimise._hardware import Run as Run
from perfmodel.planning.optimise._hardware import design_hardware as design_hardware
from perfmodel.planning.optimise._micro_batches import MicroBatchResult as MicroBatchResult
from perfmodel.planning.optimise._micro_batches import by_micro_batch as by_micro_batch
from perfmodel.planning.optimise._micro_batches import size_micro_batches as size_micro_batches
from perfmodel.planning.optimise._partition import PartitionResult as PartitionResult
from perfmodel.planning.optimise._partition import balanced as balanced
from perfmodel.planning.optimise._partition import partition as partition
from perfmodel.planning.optimise._partition import partition_bound_s as partition_bound_s
from perfmodel.planning.optimise._partition import partition_stages as partition_stages
from perfmodel.planning.optimise._partition import spread_bound_s as spread_bound_s
from perfmodel.planning.optimise._pipeline import Certificate as Certificate
from perfmodel.planning.optimise._relax import Relaxation as Relaxation
from perfmodel.planning.optimise._relax import Relaxed as Relaxed
from perfmodel.planning.optimise._relax import relax as relax
from perfmodel.planning.optimise._relaxed_partition import relaxed_partitions as relaxed_partitions
from perfmodel.planning.optimise._variables import Box as Box
from perfmodel.planning.optimise._variables import Choices as Choices
from perfmodel.planning.optimise._variables import Shares as Shares
from perfmodel.planning.optimise._variables import WholeShares as WholeShares

shorten_reprs(__name__)
