"""Closing the loop with a real cluster: parameters from measured runs."""

from perfmodel.calibration._end_to_end import calibrate_end_to_end as calibrate_end_to_end
from perfmodel.calibration._result import EndToEnd as EndToEnd
from perfmodel.calibration._result import FittedParameter as FittedParameter
from perfmodel.calibration._runs import Run as Run
