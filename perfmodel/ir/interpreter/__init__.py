"""Runs pipeline schedules on small JAX models, to check their results rather than their times."""

from perfmodel.display import shorten_reprs
from perfmodel.ir.interpreter._accuracy import (
    AccuracyCurve,
    Places,
    Task,
    TimeToAccuracy,
    accuracy_curve,
    digits_task,
    land_or_sea,
    map_task,
)
from perfmodel.ir.interpreter._layers import (
    Layer,
    LayeredModel,
    causal_model,
    conv_model,
    mlp_model,
    sequential_gradients,
)
from perfmodel.ir.interpreter._run import ScheduleRun, run_schedule
from perfmodel.ir.interpreter._training import (
    TrainingCurve,
    as_mini_batches,
    teacher_data,
    train,
    training_curve,
)

shorten_reprs(__name__)
