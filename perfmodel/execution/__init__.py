"""Execution of programs: what they compute (reference), when (simulated), and both for real (processes)."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.execution._kernels import KERNELS, jax_dtype
    from perfmodel.execution._pair_times import PairTimes, measure_pair, predict_ranks
    from perfmodel.execution._rank_events import rank_events
    from perfmodel.execution._reference import execute, execute_function, random_inputs, rounded_inputs
    from perfmodel.execution._run import Run, program_ranks, rank_codes, run
    from perfmodel.execution._session import ProgramSession, RankCode
    from perfmodel.execution._simulate import (
        Timer,
        chrome_trace,
        cluster_timer,
        durations,
        simulate,
        write_chrome_trace,
    )
    from perfmodel.execution._structure import ProgramStructure, program_structure

# on first use: a rank of an emulated world, whose memory and start are the script's, needs no JAX
__getattr__, __dir__ = lazy_names(__name__)
