"""What if the hardware, the network or a rank were different: before and after, sensitivities, curves."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.what_if._scenario import HARDWARE as HARDWARE
from perfmodel.planning.what_if._scenario import NAMES as NAMES
from perfmodel.planning.what_if._scenario import NETWORK as NETWORK
from perfmodel.planning.what_if._scenario import Scenario as Scenario
from perfmodel.planning.what_if._scenario import Setting as Setting
from perfmodel.planning.what_if._scenario import parse_setting as parse_setting
from perfmodel.planning.what_if._study import Curve as Curve
from perfmodel.planning.what_if._study import WhatIf as WhatIf
from perfmodel.planning.what_if._study import in_scenario as in_scenario
from perfmodel.planning.what_if._study import model_in_scenario as model_in_scenario
from perfmodel.planning.what_if._study import parse_sweep as parse_sweep
from perfmodel.planning.what_if._study import step_s as step_s
from perfmodel.planning.what_if._study import sweep as sweep
from perfmodel.planning.what_if._study import whatif as whatif

shorten_reprs(__name__)
