"""The step time as a pure JAX function of parameters."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction.differentiable._function import StepTimeFunction as StepTimeFunction
from perfmodel.prediction.differentiable._function import step_time_function as step_time_function
from perfmodel.prediction.differentiable._function import step_time_function_of as step_time_function_of
from perfmodel.prediction.differentiable._parameters import Bounds as Bounds
from perfmodel.prediction.differentiable._parameters import StepParameters as StepParameters
from perfmodel.prediction.differentiable._program import Programs as Programs

shorten_reprs(__name__)
