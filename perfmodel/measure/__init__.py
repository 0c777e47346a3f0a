"""Timing of kernels and collectives on the machine at hand; JAX is imported when something is timed.

- `_plan` reads what to measure, `_estimate` says how long that takes, `_run` does it and writes a table with its card
  (`_card`), row by row through `_sweep`, so that an interrupted run goes on where it was.
- `_harness` repeats a call until its median is known, `_meter` says how much other work disturbed it.
- Kernels run as `_programs` on a `_backend` (`_jax_backend`, `_torch_backend`). Collectives run between the processes
  of a `_group`, each a `_rank` (`_torch_rank`), or by the programs of `_nccl_tests`.
- Ranks on several nodes are started by a `_launch` and run by `_agents`; `_hosts` emulates nodes on one machine.
- `_diff` compares two tables.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.catalog import usable_cores
    from perfmodel.measure._agents import Agent, gathered, serve_agent
    from perfmodel.measure._backend import INTERCONNECT, open_backend
    from perfmodel.measure._card import Card, card_path, read_card
    from perfmodel.measure._diff import compare
    from perfmodel.measure._estimate import RemainingTime, estimate_plan, kept_rows, recorded_s, summary
    from perfmodel.measure._group import RankGroup, transfer_time_s
    from perfmodel.measure._harness import Sample, StoppingRule, Timing, measuring_s, median_interval, time_calls
    from perfmodel.measure._hosts import EmulatedHosts, EmulatedNetwork, Host
    from perfmodel.measure._launch import Launch, find_launch
    from perfmodel.measure._meter import machine_meter, wait_until_quiet
    from perfmodel.measure._nccl_tests import NcclTests
    from perfmodel.measure._plan import Plan, plan_text, read_plan, write_plan
    from perfmodel.measure._programs import MEASURED_FAMILIES, check_kernel
    from perfmodel.measure._rank import Place, RankSession, free_port
    from perfmodel.measure._rows import NOT_IDENTITY, Point, point_key, present
    from perfmodel.measure._run import check_folder, check_machine, check_plan, run_plan

__getattr__, __dir__ = lazy_names(__name__)
