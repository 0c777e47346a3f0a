"""The decision report: one page with every layout, its assumptions, and how to launch it."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.decision._report import DecisionReport, report
from perfmodel.planning.decision._scenarios import KNOBS, Turned, turned

shorten_reprs(__name__)
