"""Searches for the best layout."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.planning.layouts._candidates import Candidates, gather
    from perfmodel.planning.layouts._enumerate import enumerate_grids, enumerate_layouts
    from perfmodel.planning.layouts._executor import Executor, open_executor
    from perfmodel.planning.layouts._impossible import Change, Impossible
    from perfmodel.planning.layouts._improve import Improvement
    from perfmodel.planning.layouts._objective import OBJECTIVES, Goal
    from perfmodel.planning.layouts._pareto import ParetoFront, non_dominated, pareto
    from perfmodel.planning.layouts._quantities import MILLION
    from perfmodel.planning.layouts._quantities import NAMES as QUANTITIES
    from perfmodel.planning.layouts._result import Beyond, SearchResult
    from perfmodel.planning.layouts._robust import (
        DRAWS,
        MOST_STORED,
        Robustness,
        mixture_draws,
        robustness,
        sobol_points,
        square_root,
    )
    from perfmodel.planning.layouts._search import search
    from perfmodel.planning.layouts._space import (
        SearchSpace,
        default_space,
        restrict,
        with_options,
        with_schedules,
    )
    from perfmodel.planning.layouts._text import (
        interval,
        layout_last,
        print_pareto,
        print_search,
    )
    from perfmodel.planning.layouts.questions import ask
    from perfmodel.planning.layouts.search_words import SearchOptions, Tariff

__getattr__, __dir__ = lazy_names(__name__)
