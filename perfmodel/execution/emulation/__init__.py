"""One real node in an emulated cluster: a training script runs unmodified as some ranks of a world it believes in."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.execution.emulation._classes import Classes as Classes
    from perfmodel.execution.emulation._classes import classes_of_program as classes_of_program
    from perfmodel.execution.emulation._classes import classes_of_script as classes_of_script
    from perfmodel.execution.emulation._classes import run_classes as run_classes
    from perfmodel.execution.emulation._curve import EmulatedCurve as EmulatedCurve
    from perfmodel.execution.emulation._curve import emulated_curve as emulated_curve
    from perfmodel.execution.emulation._jax_programs import EmulatedProgram as EmulatedProgram
    from perfmodel.execution.emulation._jax_programs import emulate_program as emulate_program
    from perfmodel.execution.emulation._launch import Emulation as Emulation
    from perfmodel.execution.emulation._launch import emulate as emulate
    from perfmodel.execution.emulation._measure import measure_prices as measure_prices
    from perfmodel.execution.emulation._operations import Network as Network
    from perfmodel.execution.emulation._orders import EmulationError as EmulationError
    from perfmodel.execution.emulation._prices import Prices as Prices
    from perfmodel.execution.emulation._prices import PriceTable as PriceTable
    from perfmodel.execution.emulation._prices import modelled as modelled
    from perfmodel.execution.emulation._prices import plugged as plugged
    from perfmodel.execution.emulation._replay import Replay as Replay
    from perfmodel.execution.emulation._replay import replay as replay
    from perfmodel.execution.emulation._run import EmulatedRun as EmulatedRun
    from perfmodel.execution.emulation._run import read_run as read_run
    from perfmodel.execution.emulation._spans import iteration as iteration
    from perfmodel.execution.emulation._spans import measured_trace as measured_trace
    from perfmodel.execution.emulation._spans import typical as typical

_MODULES = {
    "_classes": "Classes classes_of_program classes_of_script run_classes",
    "_curve": "EmulatedCurve emulated_curve",
    "_jax_programs": "EmulatedProgram emulate_program",
    "_launch": "Emulation emulate",
    "_measure": "measure_prices",
    "_operations": "Network",
    "_orders": "EmulationError",
    "_prices": "PriceTable Prices modelled plugged",
    "_replay": "Replay replay",
    "_run": "EmulatedRun read_run",
    "_spans": "iteration measured_trace typical",
}
"""On first use: a rank's process, whose memory and start are the script's, imports next to nothing of this."""

__getattr__ = lazy_names(__name__, _MODULES)
