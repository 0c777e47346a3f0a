"""What-if studies of hardware, network or a slow rank: before and after, sensitivities, curves."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.what_if._scenario import (
    HARDWARE,
    NAMES,
    NETWORK,
    Scenario,
    Setting,
    parse_setting,
)
from perfmodel.planning.what_if._study import (
    Curve,
    WhatIf,
    in_scenario,
    model_in_scenario,
    parse_sweep,
    step_s,
    sweep,
    whatif,
)

shorten_reprs(__name__)
