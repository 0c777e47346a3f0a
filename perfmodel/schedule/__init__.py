"""Pipeline schedules: which device runs which pass of which micro-batch, in what order.

A new schedule is a function from (devices, micro_batches, chunks) to a `Schedule`, written with
`from_keys` (a formula), `arrange` (rules) or `from_orders` (lists) and made known with `register`; or a
text file in the form of `parse_schedule`.
"""

from importlib import import_module
from pkgutil import iter_modules

from perfmodel.display import shorten_reprs
from perfmodel.schedule._arrange import arrange as arrange
from perfmodel.schedule._asynchronous import nf1b as nf1b
from perfmodel.schedule._asynchronous import pipedream as pipedream
from perfmodel.schedule._asynchronous import pipedream_2bw as pipedream_2bw
from perfmodel.schedule._asynchronous import pipedream_vertical_sync as pipedream_vertical_sync
from perfmodel.schedule._asynchronous import version_difference as version_difference
from perfmodel.schedule._bidirectional import backward_halving as backward_halving
from perfmodel.schedule._bidirectional import bidirectional_stages as bidirectional_stages
from perfmodel.schedule._bidirectional import chimera as chimera
from perfmodel.schedule._bidirectional import forward_doubling as forward_doubling
from perfmodel.schedule._bidirectional import gems as gems
from perfmodel.schedule._check import Problem as Problem
from perfmodel.schedule._check import check as check
from perfmodel.schedule._check import require_valid as require_valid
from perfmodel.schedule._chimera_model import ChimeraModel as ChimeraModel
from perfmodel.schedule._chimera_model import chimera_model as chimera_model
from perfmodel.schedule._chimera_model import rabenseifner_s as rabenseifner_s
from perfmodel.schedule._construct import Work as Work
from perfmodel.schedule._construct import even_split as even_split
from perfmodel.schedule._construct import forward_part as forward_part
from perfmodel.schedule._construct import from_keys as from_keys
from perfmodel.schedule._construct import from_orders as from_orders
from perfmodel.schedule._construct import looped_stages as looped_stages
from perfmodel.schedule._construct import repeated as repeated
from perfmodel.schedule._construct import v_stages as v_stages
from perfmodel.schedule._dualpipe import dualpipe as dualpipe
from perfmodel.schedule._dualpipe import dualpipe_v as dualpipe_v
from perfmodel.schedule._facts import ChunkTimes as ChunkTimes
from perfmodel.schedule._facts import ScheduleFacts as ScheduleFacts
from perfmodel.schedule._facts import chunk_facts as chunk_facts
from perfmodel.schedule._facts import equal_parts as equal_parts
from perfmodel.schedule._facts import schedule_facts as schedule_facts
from perfmodel.schedule._memory import Offloads as Offloads
from perfmodel.schedule._memory import alive_at_peak as alive_at_peak
from perfmodel.schedule._memory import in_flight as in_flight
from perfmodel.schedule._memory import offloaded_at_peak as offloaded_at_peak
from perfmodel.schedule._memory import offloads as offloads
from perfmodel.schedule._memory import peak_live as peak_live
from perfmodel.schedule._optimise import PassTimes as PassTimes
from perfmodel.schedule._optimise import optimised as optimised
from perfmodel.schedule._optimise import starts_and_ends as starts_and_ends
from perfmodel.schedule._registry import Scheduler as Scheduler
from perfmodel.schedule._registry import get_schedule as get_schedule
from perfmodel.schedule._registry import register as register
from perfmodel.schedule._registry import schedule_names as schedule_names
from perfmodel.schedule._schedule import NEVER as NEVER
from perfmodel.schedule._schedule import Dependencies as Dependencies
from perfmodel.schedule._schedule import Instruction as Instruction
from perfmodel.schedule._schedule import Phase as Phase
from perfmodel.schedule._schedule import Schedule as Schedule
from perfmodel.schedule._synchronous import breadth_first as breadth_first
from perfmodel.schedule._synchronous import forward_only as forward_only
from perfmodel.schedule._synchronous import gpipe as gpipe
from perfmodel.schedule._synchronous import interleaved as interleaved
from perfmodel.schedule._synchronous import one_forward_one_backward as one_forward_one_backward
from perfmodel.schedule._synchronous import seq1f1b as seq1f1b
from perfmodel.schedule._text import parse_schedule as parse_schedule
from perfmodel.schedule._text import read_schedule as read_schedule
from perfmodel.schedule._text import schedule_text as schedule_text
from perfmodel.schedule._versions import WeightPolicy as WeightPolicy
from perfmodel.schedule._versions import WeightVersions as WeightVersions
from perfmodel.schedule._versions import weight_versions as weight_versions
from perfmodel.schedule._zero_bubble import v_half as v_half
from perfmodel.schedule._zero_bubble import v_min as v_min
from perfmodel.schedule._zero_bubble import zb_h1 as zb_h1
from perfmodel.schedule._zero_bubble import zb_h2 as zb_h2
from perfmodel.schedule._zero_bubble import zb_v as zb_v

for _module in iter_modules(__path__):  # a schedule is a module that registers itself
    import_module(f"{__name__}.{_module.name}")

shorten_reprs(__name__)
