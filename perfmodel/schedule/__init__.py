"""Pipeline schedules: the order in which each device runs its passes.

- `_schedule` is the record: each device's instructions in order, and what each of them waits for.
- `_synchronous`, `_zero_bubble`, `_bidirectional` and `_asynchronous` make the orders of the
  papers. `_squeeze` shortens those whose pipeline runs in a V, `_optimise` makes one for given
  times.
- `_check` finds out whether an order can run, `memory` what it holds, `facts` how long it takes and
  how stale its gradients are. `_chimera_model` is Chimera's own closed form beside it.
- `_registry` has schedules by name, `_text` writes them to files.

A new schedule is a function from (devices, micro_batches, chunks) to a `Schedule`, written with
`from_keys` (a formula), `arrange` (rules) or `from_orders` (lists) of `_construct` and made known
with `register`; or a text file in the form of `parse_schedule`.
"""

from importlib import import_module
from pkgutil import iter_modules

from perfmodel.display import shorten_reprs
from perfmodel.schedule._asynchronous import (
    WeightVersions,
    version_difference,
    weight_versions,
)
from perfmodel.schedule._bidirectional import (
    bidirectional_stages,
)
from perfmodel.schedule._check import Problem, check, require_valid
from perfmodel.schedule._chimera_model import ChimeraModel, chimera_model, rabenseifner_s
from perfmodel.schedule._construct import (
    Work,
    arrange,
    forward_part,
    from_keys,
    from_orders,
    repeated,
)
from perfmodel.schedule._optimise import optimised
from perfmodel.schedule._registry import (
    Scheduler,
    WeightPolicy,
    even_split,
    get_schedule,
    leading_layers,
    looped_stages,
    register,
    schedule_names,
    v_stages,
)
from perfmodel.schedule._schedule import NEVER, Dependencies, Instruction, Phase, Schedule
from perfmodel.schedule._text import parse_schedule, read_schedule, schedule_text
from perfmodel.schedule.facts import PassTimes, schedule_facts

# A schedule's generator is not imported by name: its module registers it (`get_schedule`).
for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

shorten_reprs(__name__)
