"""Predicts step time and memory from a model, a cluster and a layout.

This door has the predictions themselves: `predict` and `explain` (one layout with its interval and
its account), `evaluate` (step times by the thousand), checks, and the steps of one prediction in
their order. Beside it are:

- `perfmodel.prediction.memory`: what a step needs of a device's memory, and whether it fits;
- `perfmodel.prediction.blocks`, `.phases`, `.placement`, `.overlap`, `.host`, `.layer_copies`: what
  steps are made of;
- `perfmodel.prediction.comparison`, `.text`: schedules beside each other; predictions for people;
- `perfmodel.prediction.composition`: parts for rooms that compose steps themselves;
- `perfmodel.prediction.grids`: memory and lower bounds of layouts by the million;
- `perfmodel.prediction.sites`: corrections by measured runs, and how far runs of a site may differ;
- `perfmodel.prediction.differentiable`: the step time as a JAX function of its parameters.
"""

from perfmodel.display import shorten_reprs
from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._check import check_layout, check_machine
from perfmodel.prediction._compose import LayoutBatch, layout_batches
from perfmodel.prediction._durations import durations, pass_times
from perfmodel.prediction._evaluate import evaluate, step_derivatives, step_times_s
from perfmodel.prediction._explain import EventShares, event_shares
from perfmodel.prediction._interval import Joint, joint_errors
from perfmodel.prediction._predict import explain, layout_of, predict
from perfmodel.prediction._prediction import (
    CriticalEvent,
    PassEvent,
    PassPart,
    Prediction,
    StageMemory,
)
from perfmodel.prediction._price import priced_events
from perfmodel.prediction._problem import StepProblem, step_problem, step_problem_of
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._terms import STEP_TERMS, without
from perfmodel.prediction.blocks import shard_events
from perfmodel.prediction.comparison import compare_schedules
from perfmodel.prediction.sites import COMPILED, EAGER, GAUSS_90, Site

shorten_reprs(__name__)
