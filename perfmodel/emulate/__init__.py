"""Emulates a cluster: an unmodified training script runs as some ranks of a larger world."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate._classes import (
        Classes,
        classes_of_program,
        classes_of_script,
        run_classes,
    )
    from perfmodel.emulate._jax_programs import EmulatedProgram, emulate_program
    from perfmodel.emulate._launch import Emulation, emulate
    from perfmodel.emulate._measure import at_one_speed, measure_prices, spread
    from perfmodel.emulate._prices import Prices, PriceTable, modelled, placed, plugged
    from perfmodel.emulate._replay import EmulatedCurve, Replay, emulated_curve, replay
    from perfmodel.emulate.environment._orders import EmulationError
    from perfmodel.emulate.runs._run import EmulatedRun, read_run
    from perfmodel.emulate.runs._spans import iteration, measured_trace, typical
    from perfmodel.emulate.wire._operations import Network
    from perfmodel.emulate.wire._wire import PeerPlace

# Imported on first use: a rank's process runs the user's script, whose memory and start-up are
# measured.
__getattr__, __dir__ = lazy_names(__name__)
