"""One question, with the objective that ranks its layouts and how to search them."""

from dataclasses import dataclass

from perfmodel.planning.layouts._objective import Goal
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.layouts.search_words import SearchOptions


@dataclass(frozen=True)
class SearchTask:
    """What one search does."""

    question: Question
    """The job, and the layouts to search."""
    goal: Goal
    """Objective and constraints."""
    options: SearchOptions
    """How the search works, and how much of its result is shown."""
