"""One real node in an emulated cluster: a training script runs unmodified as some ranks of a world it believes in."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.execution.emulation._classes import Classes, classes_of_program, classes_of_script, run_classes
    from perfmodel.execution.emulation._jax_programs import EmulatedProgram, emulate_program
    from perfmodel.execution.emulation._launch import Emulation, emulate
    from perfmodel.execution.emulation._measure import measure_prices
    from perfmodel.execution.emulation._operations import Network
    from perfmodel.execution.emulation._orders import EmulationError
    from perfmodel.execution.emulation._prices import Prices, PriceTable, modelled, plugged
    from perfmodel.execution.emulation._replay import EmulatedCurve, Replay, emulated_curve, replay
    from perfmodel.execution.emulation._run import EmulatedRun, read_run
    from perfmodel.execution.emulation._spans import iteration, measured_trace, typical

# on first use: a rank's process, whose memory and start are the script's, imports next to nothing of this
__getattr__, __dir__ = lazy_names(__name__)
