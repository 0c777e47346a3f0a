"""Model + cluster + layout -> prediction."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction._adjustment import (
    HOST_FACTORS,
    KERNEL_FACTORS,
    LINK_FACTORS,
    LOSSES,
    PARAMETERS,
    SKEW,
    Adjustment,
    factors_of,
    save_adjustments,
)
from perfmodel.prediction._check import check_layout, check_machine, check_pipeline, layout_of, stages_without_layer
from perfmodel.prediction._compare import Compared, Comparison, chimera_closed_form, compare_schedules
from perfmodel.prediction._compose import (
    LayoutBatch,
    bundle_events,
    event_classes,
    in_program_of,
    layout_batches,
    pass_s,
    weighted_programs,
)
from perfmodel.prediction._coverage import NOTHING_UNKNOWN, UNKNOWNS, Coverage, Seen, model_kind
from perfmodel.prediction._durations import durations, pass_times
from perfmodel.prediction._evaluate import (
    StepDerivatives,
    derivatives_towards,
    evaluate,
    step_derivatives,
    step_programs,
    step_time_s,
    step_times_s,
)
from perfmodel.prediction._explain import EventShares, event_shares
from perfmodel.prediction._fits import (
    bundle_memory,
    fit_probabilities,
    fitting,
    fullness,
    needed_memory,
    peak_memory,
    rank_checkpoint_bytes,
    rank_devices,
    version_difference,
)
from perfmodel.prediction._fitted_runs import FittedRuns
from perfmodel.prediction._grid import LayoutGrid, PipelineChoice, RecomputeChoice, ShardChoice, StateChoice
from perfmodel.prediction._grid_costs import GridCosts, lower_bounds_s, pass_work_s, price_grids
from perfmodel.prediction._interval import GAUSS_90, Joint, joint_errors, joint_of, shared_errors
from perfmodel.prediction._known_runs import (
    OUTLIERS,
    Coordinates,
    CovarianceTerms,
    KnownRuns,
    LayoutKernel,
    Scales,
    half_width,
    known_runs,
    scales,
    standard_nodes,
    widened,
)
from perfmodel.prediction._memory import CATEGORIES
from perfmodel.prediction._mixture import (
    ChoiceEffect,
    LogNormalMixture,
    Tuning,
    choice_effects,
    posterior_weights,
    representatives,
    tuned_weights,
    weighted_median,
)
from perfmodel.prediction._phases import Phase
from perfmodel.prediction._pipeline import LiveState
from perfmodel.prediction._placement import Placement, placement_on_network, rank_strides
from perfmodel.prediction._population import CARD_NAME as POPULATION_CARD
from perfmodel.prediction._population import (
    CLASSES,
    DEGREES,
    GENERIC,
    NEUTRAL,
    SitePopulation,
    SitePrior,
    class_of,
    key,
    population,
)
from perfmodel.prediction._population import FILE_NAME as POPULATION_FILE
from perfmodel.prediction._predict import explain, predict
from perfmodel.prediction._prediction import CriticalEvent, PassEvent, PassPart, Prediction, StageMemory
from perfmodel.prediction._price import block_times, priced_events
from perfmodel.prediction._problem import Setting, StepProblem, step_problem, step_problem_of
from perfmodel.prediction._programs import Prepared, prepared, program_live
from perfmodel.prediction._shard import shard_blocks, shard_events
from perfmodel.prediction._site import COMPILED, EAGER, Site, attention_slowdown, generation
from perfmodel.prediction._site_constants import (
    MEMORY_FILE,
    SUSTAINED_FILE,
    sustained,
    sustained_from,
)
from perfmodel.prediction._stage_costs import StageCosts, one_stage_per_rank, stage_costs
from perfmodel.prediction._stages import by_layer, layer_count, segment_sizes, stage_blocks
from perfmodel.prediction._step_costs import beside_loss, layout_coordinates
from perfmodel.prediction._teams import (
    keys_share_a_team,
    reports_a_problem,
    share_a_team,
    source_of_submitter,
    team_key,
    teams_of,
)
from perfmodel.prediction._terms import STEP_TERMS, StepTerm, without
from perfmodel.prediction._text import memory_words, print_breakdown, print_prediction
from perfmodel.prediction._zero import checkpoint_bytes

shorten_reprs(__name__)
