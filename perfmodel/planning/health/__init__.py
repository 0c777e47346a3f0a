"""Checks whether a training run is healthy: its log compared with a prediction, likely causes, and
what to measure next."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.health._health import check_run
from perfmodel.planning.health._run_health import RunHealth
from perfmodel.planning.health._runs import runs_of_logs
from perfmodel.planning.health._series import Drift, Stalls, StepSeries, step_series
from perfmodel.planning.health._shown import Cause

shorten_reprs(__name__)
