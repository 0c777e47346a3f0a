"""Records of emulated runs: calls of every rank and their times."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate.runs._record import COLLECTIVE_COLUMNS, CollectiveNote, Record, record_of
    from perfmodel.emulate.runs._run import EmulatedRun, RankRun, read_run
    from perfmodel.emulate.runs._spans import (
        Iteration,
        User,
        done_at_s,
        iteration,
        measured_trace,
        own_s,
        typical,
        users_of,
    )
    from perfmodel.emulate.runs._waiting import (
        RECORDED_CALLS,
        RECORDER_VARIABLE,
        disagreement,
        watch_waiting,
    )

__getattr__, __dir__ = lazy_names(__name__)
