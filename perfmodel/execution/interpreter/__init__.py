"""Runs pipeline schedules on small JAX models: what they compute, not how long they take."""

from perfmodel.display import shorten_reprs
from perfmodel.execution.interpreter._accuracy import AccuracyCurve as AccuracyCurve
from perfmodel.execution.interpreter._accuracy import Places as Places
from perfmodel.execution.interpreter._accuracy import TimeToAccuracy as TimeToAccuracy
from perfmodel.execution.interpreter._accuracy import accuracy_curve as accuracy_curve
from perfmodel.execution.interpreter._accuracy import land_or_sea as land_or_sea
from perfmodel.execution.interpreter._layers import Layer as Layer
from perfmodel.execution.interpreter._layers import LayeredModel as LayeredModel
from perfmodel.execution.interpreter._layers import causal_model as causal_model
from perfmodel.execution.interpreter._layers import mlp_model as mlp_model
from perfmodel.execution.interpreter._layers import sequential_gradients as sequential_gradients
from perfmodel.execution.interpreter._run import ScheduleRun as ScheduleRun
from perfmodel.execution.interpreter._run import run_schedule as run_schedule
from perfmodel.execution.interpreter._training import TrainingCurve as TrainingCurve
from perfmodel.execution.interpreter._training import as_mini_batches as as_mini_batches
from perfmodel.execution.interpreter._training import teacher_data as teacher_data
from perfmodel.execution.interpreter._training import train as train
from perfmodel.execution.interpreter._training import training_curve as training_curve

shorten_reprs(__name__)
