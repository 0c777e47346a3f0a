"""Layout search."""

from perfmodel.display import shorten_reprs
from perfmodel.layout_search._candidates import Candidates as Candidates
from perfmodel.layout_search._candidates import gather as gather
from perfmodel.layout_search._enumerate import enumerate_grids as enumerate_grids
from perfmodel.layout_search._enumerate import enumerate_layouts as enumerate_layouts
from perfmodel.layout_search._executor import Executor as Executor
from perfmodel.layout_search._executor import open_executor as open_executor
from perfmodel.layout_search._impossible import Change as Change
from perfmodel.layout_search._impossible import Impossible as Impossible
from perfmodel.layout_search._improve import Improvement as Improvement
from perfmodel.layout_search._objective import OBJECTIVES as OBJECTIVES
from perfmodel.layout_search._objective import Goal as Goal
from perfmodel.layout_search._pareto import ParetoFront as ParetoFront
from perfmodel.layout_search._pareto import pareto as pareto
from perfmodel.layout_search._quantities import NAMES as QUANTITIES
from perfmodel.layout_search._quantities import Tariff as Tariff
from perfmodel.layout_search._question import METHODS as METHODS
from perfmodel.layout_search._question import ORDERS as ORDERS
from perfmodel.layout_search._question import Progress as Progress
from perfmodel.layout_search._question import Question as Question
from perfmodel.layout_search._question import SearchOptions as SearchOptions
from perfmodel.layout_search._question import ask as ask
from perfmodel.layout_search._result import Beyond as Beyond
from perfmodel.layout_search._result import SearchResult as SearchResult
from perfmodel.layout_search._robust import Robustness as Robustness
from perfmodel.layout_search._robust import robustness as robustness
from perfmodel.layout_search._search import BestLayout as BestLayout
from perfmodel.layout_search._search import fastest as fastest
from perfmodel.layout_search._search import search as search
from perfmodel.layout_search._space import OPTIONS as OPTIONS
from perfmodel.layout_search._space import SearchSpace as SearchSpace
from perfmodel.layout_search._space import default_space as default_space
from perfmodel.layout_search._space import restrict as restrict
from perfmodel.layout_search._space import with_options as with_options
from perfmodel.layout_search._space import with_schedules as with_schedules

shorten_reprs(__name__)
