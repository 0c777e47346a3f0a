"""Executes programs in one process, simulates their timing, and runs them on real processes."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.ir.execution._kernels import KERNELS, KernelCall, jax_dtype
    from perfmodel.ir.execution._reference import (
        execute,
        execute_function,
        random_inputs,
        rounded_inputs,
    )
    from perfmodel.ir.execution._run import Run, program_ranks, rank_codes, run
    from perfmodel.ir.execution._session import ProgramSession, RankCode
    from perfmodel.ir.execution._simulate import (
        Timer,
        chrome_trace,
        cluster_timer,
        durations,
        simulate,
        simulate_on_cores,
        write_chrome_trace,
    )
    from perfmodel.ir.execution._structure import ProgramStructure, placed, program_structure
    from perfmodel.ir.execution.events import rank_events
    from perfmodel.ir.execution.pair_times import PairTimes, measure_pair, predict_ranks

# Imported on first use: a rank of an emulated world runs the user's script, and importing JAX there
# would add to its memory and start-up, which are what is measured.
__getattr__, __dir__ = lazy_names(__name__)
