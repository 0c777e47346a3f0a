"""From a search to a decision: one page that holds every layout, what it rests on, and how to launch it."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.decision._report import DecisionReport as DecisionReport
from perfmodel.planning.decision._report import report as report
from perfmodel.planning.decision._scenarios import KNOBS as KNOBS
from perfmodel.planning.decision._scenarios import Turned as Turned
from perfmodel.planning.decision._scenarios import turned as turned

shorten_reprs(__name__)
