"""From a search to a decision: one page that holds every layout, what it rests on, and how to launch it."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.decision._report import DecisionReport, report
from perfmodel.planning.decision._scenarios import KNOBS, Turned, turned

shorten_reprs(__name__)
