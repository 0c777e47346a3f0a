"""Inverse questions: how much memory, how many devices, which part of the machine to upgrade, when a layout wins."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.design._devices import DevicesNeeded as DevicesNeeded
from perfmodel.planning.design._devices import devices_for as devices_for
from perfmodel.planning.design._memory import MemoryNeeded as MemoryNeeded
from perfmodel.planning.design._memory import memory_to_fit as memory_to_fit
from perfmodel.planning.design._overtake import Overtaking as Overtaking
from perfmodel.planning.design._overtake import overtake as overtake
from perfmodel.planning.design._upgrade import Upgrade as Upgrade
from perfmodel.planning.design._upgrade import Upgrades as Upgrades
from perfmodel.planning.design._upgrade import rank_upgrades as rank_upgrades

shorten_reprs(__name__)
