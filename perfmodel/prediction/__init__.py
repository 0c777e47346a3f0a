"""Model + cluster + layout -> prediction."""

from perfmodel.prediction._check import check_layout as check_layout
from perfmodel.prediction._compare import Compared as Compared
from perfmodel.prediction._compare import compare_schedules as compare_schedules
from perfmodel.prediction._explain import event_label as event_label
from perfmodel.prediction._framework import COMPILED as COMPILED
from perfmodel.prediction._framework import EAGER as EAGER
from perfmodel.prediction._framework import Framework as Framework
from perfmodel.prediction._predict import explain as explain
from perfmodel.prediction._predict import fit_reasons as fit_reasons
from perfmodel.prediction._predict import predict as predict
from perfmodel.prediction._predict import step_model as step_model
from perfmodel.prediction._prediction import CriticalEvent as CriticalEvent
from perfmodel.prediction._prediction import Prediction as Prediction
from perfmodel.prediction._prediction import StageMemory as StageMemory
from perfmodel.prediction._shares import EventShares as EventShares
from perfmodel.prediction._shares import event_shares as event_shares
from perfmodel.prediction._step_model import StepModel as StepModel
