"""Calibrating a cluster: which events to measure for a model and in which order, and what whole runs say."""

from perfmodel.calibration._active import Round as Round
from perfmodel.calibration._active import Selection as Selection
from perfmodel.calibration._active import choose as choose
from perfmodel.calibration._active import most_uncertain as most_uncertain
from perfmodel.calibration._active import select as select
from perfmodel.calibration._active import selection_text as selection_text
from perfmodel.calibration._active import step_variance as step_variance
from perfmodel.calibration._beliefs import Beliefs as Beliefs
from perfmodel.calibration._beliefs import condition as condition
from perfmodel.calibration._calibrate import calibrate_model as calibrate_model
from perfmodel.calibration._corrections import LEAST_SHARE as LEAST_SHARE
from perfmodel.calibration._corrections import NAMED_SD as NAMED_SD
from perfmodel.calibration._corrections import Correction as Correction
from perfmodel.calibration._corrections import corrections as corrections
from perfmodel.calibration._end_to_end import EndToEnd as EndToEnd
from perfmodel.calibration._end_to_end import FittedParameter as FittedParameter
from perfmodel.calibration._end_to_end import calibrate_end_to_end as calibrate_end_to_end
from perfmodel.calibration._model_plan import LayoutCost as LayoutCost
from perfmodel.calibration._model_plan import ModelPlan as ModelPlan
from perfmodel.calibration._model_plan import model_plan as model_plan
from perfmodel.calibration._model_plan import plan_report as plan_report
from perfmodel.calibration._priors import Prior as Prior
from perfmodel.calibration._priors import priors as priors
from perfmodel.calibration._profile import Difference as Difference
from perfmodel.calibration._profile import ProfileFit as ProfileFit
from perfmodel.calibration._profile import ProfileReport as ProfileReport
from perfmodel.calibration._profile import amount as amount
from perfmodel.calibration._profile import explain_profile as explain_profile
from perfmodel.calibration._profile import fit_profile as fit_profile
from perfmodel.calibration._runs import Run as Run
from perfmodel.calibration._steps import HALF_WIDTH as HALF_WIDTH
from perfmodel.calibration._steps import LayoutSteps as LayoutSteps
from perfmodel.calibration._steps import Steps as Steps
from perfmodel.calibration._steps import StepShares as StepShares
from perfmodel.calibration._two_nodes import Reachable as Reachable
from perfmodel.calibration._two_nodes import distsim_all_reduce_time as distsim_all_reduce_time
from perfmodel.calibration._two_nodes import reachable as reachable
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
