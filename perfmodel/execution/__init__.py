"""Execution of programs: what they compute (reference), when (simulated), and both for real (processes)."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.execution._kernels import KERNELS as KERNELS
    from perfmodel.execution._kernels import jax_dtype as jax_dtype
    from perfmodel.execution._pair_times import PairTimes as PairTimes
    from perfmodel.execution._pair_times import measure_pair as measure_pair
    from perfmodel.execution._pair_times import predict_ranks as predict_ranks
    from perfmodel.execution._rank_events import rank_events as rank_events
    from perfmodel.execution._reference import execute as execute
    from perfmodel.execution._reference import execute_function as execute_function
    from perfmodel.execution._reference import random_inputs as random_inputs
    from perfmodel.execution._reference import rounded_inputs as rounded_inputs
    from perfmodel.execution._run import Run as Run
    from perfmodel.execution._run import program_ranks as program_ranks
    from perfmodel.execution._run import rank_codes as rank_codes
    from perfmodel.execution._run import run as run
    from perfmodel.execution._session import ProgramSession as ProgramSession
    from perfmodel.execution._session import RankCode as RankCode
    from perfmodel.execution._simulate import Timer as Timer
    from perfmodel.execution._simulate import chrome_trace as chrome_trace
    from perfmodel.execution._simulate import cluster_timer as cluster_timer
    from perfmodel.execution._simulate import durations as durations
    from perfmodel.execution._simulate import simulate as simulate
    from perfmodel.execution._simulate import write_chrome_trace as write_chrome_trace
    from perfmodel.execution._structure import ProgramStructure as ProgramStructure
    from perfmodel.execution._structure import program_structure as program_structure

_MODULES = {
    "_kernels": "KERNELS jax_dtype",
    "_pair_times": "PairTimes measure_pair predict_ranks",
    "_rank_events": "rank_events",
    "_reference": "execute execute_function random_inputs rounded_inputs",
    "_run": "Run program_ranks rank_codes run",
    "_session": "ProgramSession RankCode",
    "_simulate": "Timer chrome_trace cluster_timer durations simulate write_chrome_trace",
    "_structure": "ProgramStructure program_structure",
}
"""On first use: a rank of an emulated world, whose memory and start are the script's, needs no JAX."""

__getattr__ = lazy_names(__name__, _MODULES)
