"""What real ranks will do, predicted from what two of them measured."""

from collections.abc import Sequence

import numpy as np

from perfmodel.execution._pair_times import EventTime, PairTimes
from perfmodel.execution._rank_events import rank_events
from perfmodel.execution._shared_cores import simulate_on_cores
from perfmodel.execution._structure import program_structure
from perfmodel.program.ir import Function
from perfmodel.spec import Cluster
from perfmodel.timeline import Timeline


def predict_ranks(function: Function, cluster: Cluster, pair: PairTimes, cores: Sequence[int]) -> Timeline:
    """The timeline of a program on real ranks.

    Args:
        function: a distributed program.
        cluster: whose nodes the ranks fill in order.
        pair: measured on two ranks.
        cores: core of each rank.

    Raises:
        NoDataError: the program has an event that the two ranks did not measure.
    """
    prepared = program_structure(function, cluster)
    structure, instruction = prepared.structure, prepared.instruction
    times_s = np.array([*(pair.time(event) for event in rank_events(function, cluster)), EventTime(0.0)])
    core_s, network_s, credit_s = times_s[instruction].T  # joins are instruction -1 and take no time
    return simulate_on_cores(structure, core_s, network_s, credit_s, cores)
