"""Times kernels and collectives on this machine; JAX is imported only when something is timed.

`_plan` reads what to measure, `estimate` says how long that takes, and `_run` does it. It rests on
four rooms:

- `timing`: a call is repeated until its median is known, and a meter says how much other work
  disturbed it.
- `backends`: kernels run by JAX or PyTorch, collectives by processes or by the programs of
  nccl-tests.
- `ranks`: the processes between which collectives run, on one node, on several, or on emulated
  ones.
- `tables`: rows and the card beside them, written one by one, so that an interrupted run goes on
  where it was.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.catalog.this_machine import usable_cores
    from perfmodel.measure._checks import check_plan
    from perfmodel.measure._plan import Plan, expand, plan_text, read_plan, write_plan
    from perfmodel.measure._run import check_folder, check_machine, run_plan
    from perfmodel.measure.backends._backend import open_backend
    from perfmodel.measure.estimate import RemainingTime, estimate_plan, kept_rows, summary
    from perfmodel.measure.ranks._agents import gathered, serve_agent
    from perfmodel.measure.ranks._group import transfer_time_s
    from perfmodel.measure.tables._card import read_card
    from perfmodel.measure.tables._diff import compare

__getattr__, __dir__ = lazy_names(__name__)
