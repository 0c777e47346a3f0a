"""Inverse questions: how much memory, how many devices, which part of the machine to upgrade, when a layout wins."""

from perfmodel.design._devices import DevicesNeeded as DevicesNeeded
from perfmodel.design._devices import devices_for as devices_for
from perfmodel.design._memory import MemoryNeeded as MemoryNeeded
from perfmodel.design._memory import memory_to_fit as memory_to_fit
from perfmodel.design._overtake import Overtaking as Overtaking
from perfmodel.design._overtake import overtake as overtake
from perfmodel.design._upgrade import Upgrade as Upgrade
from perfmodel.design._upgrade import Upgrades as Upgrades
from perfmodel.design._upgrade import rank_upgrades as rank_upgrades
from perfmodel.display import shorten_reprs

shorten_reprs(__name__)
