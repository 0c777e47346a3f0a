"""Layout search."""

from perfmodel.display import shorten_reprs
from perfmodel.planning.layouts._candidates import Candidates as Candidates
from perfmodel.planning.layouts._candidates import gather as gather
from perfmodel.planning.layouts._enumerate import enumerate_grids as enumerate_grids
from perfmodel.planning.layouts._enumerate import enumerate_layouts as enumerate_layouts
from perfmodel.planning.layouts._executor import Executor as Executor
from perfmodel.planning.layouts._executor import open_executor as open_executor
from perfmodel.planning.layouts._impossible import Change as Change
from perfmodel.planning.layouts._impossible import Impossible as Impossible
from perfmodel.planning.layouts._improve import Improvement as Improvement
from perfmodel.planning.layouts._intervals import Interval as Interval
from perfmodel.planning.layouts._objective import OBJECTIVES as OBJECTIVES
from perfmodel.planning.layouts._objective import Goal as Goal
from perfmodel.planning.layouts._pareto import ParetoFront as ParetoFront
from perfmodel.planning.layouts._pareto import pareto as pareto
from perfmodel.planning.layouts._quantities import MILLION as MILLION
from perfmodel.planning.layouts._quantities import NAMES as QUANTITIES
from perfmodel.planning.layouts._quantities import Tariff as Tariff
from perfmodel.planning.layouts._question import Progress as Progress
from perfmodel.planning.layouts._question import Question as Question
from perfmodel.planning.layouts._question import SearchOptions as SearchOptions
from perfmodel.planning.layouts._question import ask as ask
from perfmodel.planning.layouts._result import Beyond as Beyond
from perfmodel.planning.layouts._result import SearchResult as SearchResult
from perfmodel.planning.layouts._robust import Robustness as Robustness
from perfmodel.planning.layouts._robust import robustness as robustness
from perfmodel.planning.layouts._robust import square_root as square_root
from perfmodel.planning.layouts._search import BestLayout as BestLayout
from perfmodel.planning.layouts._search import fastest as fastest
from perfmodel.planning.layouts._search import search as search
from perfmodel.planning.layouts._space import SearchSpace as SearchSpace
from perfmodel.planning.layouts._space import default_space as default_space
from perfmodel.planning.layouts._space import restrict as restrict
from perfmodel.planning.layouts._space import with_options as with_options
from perfmodel.planning.layouts._space import with_schedules as with_schedules
from perfmodel.planning.layouts._telling import Evidence as Evidence
from perfmodel.planning.layouts._telling import Telling as Telling
from perfmodel.planning.layouts._telling import Worth as Worth
from perfmodel.planning.layouts._telling import expected_given as expected_given
from perfmodel.planning.layouts._telling import runs_and_pairs as runs_and_pairs
from perfmodel.planning.layouts._telling import telling as telling
from perfmodel.planning.layouts._telling import weighed as weighed
from perfmodel.planning.layouts._words import SEARCH_WORDS as SEARCH_WORDS
from perfmodel.planning.layouts._words import SpaceWords as SpaceWords
from perfmodel.planning.layouts._words import file_words as file_words

shorten_reprs(__name__)
