"""Parts of a prediction, for rooms that compose steps themselves: optimisers of stages, serving, fits of runs."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction._check import check_pipeline, stages_without_layer
from perfmodel.prediction._compose import bundle_events, event_classes, in_program_of, pass_s, weighted_programs
from perfmodel.prediction._evaluate import derivatives_towards, step_programs, step_time_s
from perfmodel.prediction._fits import bundle_memory, rank_devices
from perfmodel.prediction._interval import joint_of, shared_errors
from perfmodel.prediction._phases import Phase
from perfmodel.prediction._pipeline import LiveState
from perfmodel.prediction._placement import Placement, placement_on_network, rank_strides
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._programs import Prepared, program_live
from perfmodel.prediction._shard import shard_blocks
from perfmodel.prediction._stage_costs import StageCosts, one_stage_per_rank, stage_costs
from perfmodel.prediction._stages import by_layer, segment_sizes, stage_blocks
from perfmodel.prediction._step_costs import beside_loss, layout_coordinates

shorten_reprs(__name__)
