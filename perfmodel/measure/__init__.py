"""Timing of kernels and collectives on the machine at hand; JAX is imported when something is timed."""

from perfmodel.display import shorten_reprs
from perfmodel.measure._agents import Agent as Agent
from perfmodel.measure._agents import gathered as gathered
from perfmodel.measure._agents import serve_agent as serve_agent
from perfmodel.measure._backend import open_backend as open_backend
from perfmodel.measure._card import Card as Card
from perfmodel.measure._card import card_path as card_path
from perfmodel.measure._card import read_card as read_card
from perfmodel.measure._collectives import INTERCONNECT as INTERCONNECT
from perfmodel.measure._diff import compare as compare
from perfmodel.measure._estimate import RemainingTime as RemainingTime
from perfmodel.measure._estimate import estimate_plan as estimate_plan
from perfmodel.measure._estimate import kept_rows as kept_rows
from perfmodel.measure._estimate import summary as summary
from perfmodel.measure._group import RankGroup as RankGroup
from perfmodel.measure._group import transfer_time_s as transfer_time_s
from perfmodel.measure._harness import Sample as Sample
from perfmodel.measure._harness import StoppingRule as StoppingRule
from perfmodel.measure._harness import Timing as Timing
from perfmodel.measure._harness import measuring_s as measuring_s
from perfmodel.measure._harness import median_interval as median_interval
from perfmodel.measure._harness import time_calls as time_calls
from perfmodel.measure._hosts import EmulatedHosts as EmulatedHosts
from perfmodel.measure._hosts import EmulatedNetwork as EmulatedNetwork
from perfmodel.measure._hosts import Host as Host
from perfmodel.measure._launch import Launch as Launch
from perfmodel.measure._launch import find_launch as find_launch
from perfmodel.measure._meter import machine_meter as machine_meter
from perfmodel.measure._meter import usable_cores as usable_cores
from perfmodel.measure._meter import wait_until_quiet as wait_until_quiet
from perfmodel.measure._nccl_tests import NcclTests as NcclTests
from perfmodel.measure._plan import Plan as Plan
from perfmodel.measure._plan import read_plan as read_plan
from perfmodel.measure._plan_text import plan_text as plan_text
from perfmodel.measure._plan_text import write_plan as write_plan
from perfmodel.measure._programs import MEASURED_FAMILIES as MEASURED_FAMILIES
from perfmodel.measure._programs import check_kernel as check_kernel
from perfmodel.measure._rank import Place as Place
from perfmodel.measure._rank import RankSession as RankSession
from perfmodel.measure._recorded import recorded_s as recorded_s
from perfmodel.measure._rows import NOT_IDENTITY as NOT_IDENTITY
from perfmodel.measure._rows import Point as Point
from perfmodel.measure._rows import point_key as point_key
from perfmodel.measure._rows import present as present
from perfmodel.measure._run import run_plan as run_plan

shorten_reprs(__name__)
