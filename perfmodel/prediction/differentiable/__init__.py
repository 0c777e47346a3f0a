"""The step time as a pure JAX function of parameters."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction.differentiable._function import (
    StepTimeFunction,
    between_sizes,
    possible_micro_batches,
    step_time_function,
    step_time_function_of,
)
from perfmodel.prediction.differentiable._memory import Memory
from perfmodel.prediction.differentiable._prices import Bounds, StepParameters
from perfmodel.prediction.differentiable._program import Programs, greatest

shorten_reprs(__name__)
