"""Calibrates the cost models: chooses events to measure, and fits parameters to measured runs."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.calibration._active import (
        HALF_WIDTH,
        Round,
        Selection,
        Steps,
        StepShares,
        choose,
        most_uncertain,
        select,
        selection_text,
        step_variance,
    )
    from perfmodel.calibration._calibrate import LayoutSteps, calibrate_model
    from perfmodel.calibration._corrections import LEAST_SHARE, NAMED_SD, Correction, corrections
    from perfmodel.calibration._end_to_end import EndToEnd, FittedParameter, calibrate_end_to_end
    from perfmodel.calibration._model_plan import (
        LayoutCost,
        ModelPlan,
        model_plan,
        plan_report,
        saving_text,
    )
    from perfmodel.calibration._parameters import Prior, priors
    from perfmodel.calibration._profile import (
        Difference,
        ProfileFit,
        ProfileReport,
        amount,
        explain_profile,
        fit_profile,
    )
    from perfmodel.calibration._profile_events import SideBySide, Total
    from perfmodel.calibration._runs import Run, arithmetic_s
    from perfmodel.calibration._two_nodes import Reachable, distsim_all_reduce_time, reachable

__getattr__, __dir__ = lazy_names(__name__)
