"""Calibrating a cluster for one model: which events to measure, and in which order."""

from perfmodel.calibration._model_plan import LayoutCost as LayoutCost
from perfmodel.calibration._model_plan import ModelPlan as ModelPlan
from perfmodel.calibration._model_plan import model_plan as model_plan
from perfmodel.calibration._two_nodes import Reachable as Reachable
from perfmodel.calibration._two_nodes import reachable as reachable
