"""Model + cluster + layout -> prediction."""

from perfmodel.predict._check import check_layout as check_layout
from perfmodel.predict._explain import event_label as event_label
from perfmodel.predict._framework import Framework as Framework
from perfmodel.predict._predict import explain as explain
from perfmodel.predict._predict import fit_reasons as fit_reasons
from perfmodel.predict._predict import predict as predict
from perfmodel.predict._predict import step_model as step_model
from perfmodel.predict._prediction import CriticalEvent as CriticalEvent
from perfmodel.predict._prediction import Prediction as Prediction
from perfmodel.predict._prediction import StageMemory as StageMemory
from perfmodel.predict._step_model import StepModel as StepModel
