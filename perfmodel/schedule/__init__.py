"""Pipeline schedules: which device runs which pass of which micro-batch, in what order.

A new schedule is a function from (devices, micro_batches, chunks) to a `Schedule`, written with
`from_keys` (a formula) or `from_orders` (lists) and made known with `register`.
"""

from perfmodel.schedule._check import Problem as Problem
from perfmodel.schedule._check import check as check
from perfmodel.schedule._check import require_valid as require_valid
from perfmodel.schedule._construct import forward_part as forward_part
from perfmodel.schedule._construct import from_keys as from_keys
from perfmodel.schedule._construct import from_orders as from_orders
from perfmodel.schedule._construct import looped_stages as looped_stages
from perfmodel.schedule._memory import alive_at_peak as alive_at_peak
from perfmodel.schedule._memory import in_flight as in_flight
from perfmodel.schedule._memory import peak_live as peak_live
from perfmodel.schedule._registry import Scheduler as Scheduler
from perfmodel.schedule._registry import get_schedule as get_schedule
from perfmodel.schedule._registry import register as register
from perfmodel.schedule._registry import schedule_names as schedule_names
from perfmodel.schedule._schedule import NEVER as NEVER
from perfmodel.schedule._schedule import Dependencies as Dependencies
from perfmodel.schedule._schedule import Instruction as Instruction
from perfmodel.schedule._schedule import Phase as Phase
from perfmodel.schedule._schedule import Schedule as Schedule
from perfmodel.schedule._synchronous import forward_only as forward_only
from perfmodel.schedule._synchronous import gpipe as gpipe
from perfmodel.schedule._synchronous import interleaved as interleaved
from perfmodel.schedule._synchronous import one_forward_one_backward as one_forward_one_backward
