"""Parts of a prediction, for packages that compose steps themselves: stage optimisers, serving,
fits to runs."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction._check import check_pipeline, stages_without_layer
from perfmodel.prediction._communication import event_entries
from perfmodel.prediction._compose import (
    bundle_events,
    event_classes,
    in_program_of,
    pass_s,
    phase_s,
    weighted_programs,
)
from perfmodel.prediction._evaluate import derivatives_towards, step_programs, step_time_s
from perfmodel.prediction._interval import joint_of, shared_errors
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._programs import Prepared, program_live
from perfmodel.prediction._stage_costs import StageCosts, one_stage_per_rank, stage_costs
from perfmodel.prediction._step_costs import Overlap, layout_coordinates, overlap_loss, slowed_s
from perfmodel.prediction.blocks import shard_blocks
from perfmodel.prediction.phases import Phase
from perfmodel.prediction.placement import Placement, placement_on_network, rank_strides

shorten_reprs(__name__)
