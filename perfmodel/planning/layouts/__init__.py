"""Layout search."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.planning.layouts._candidates import Candidates, gather
    from perfmodel.planning.layouts._enumerate import enumerate_grids, enumerate_layouts
    from perfmodel.planning.layouts._evaluate import BestLayout, fastest
    from perfmodel.planning.layouts._executor import Executor, open_executor
    from perfmodel.planning.layouts._expression import Interval
    from perfmodel.planning.layouts._impossible import Change, Impossible
    from perfmodel.planning.layouts._improve import Improvement
    from perfmodel.planning.layouts._objective import OBJECTIVES, Goal
    from perfmodel.planning.layouts._pareto import ParetoFront, pareto
    from perfmodel.planning.layouts._quantities import MILLION
    from perfmodel.planning.layouts._quantities import NAMES as QUANTITIES
    from perfmodel.planning.layouts._question import Question, ask
    from perfmodel.planning.layouts._result import Beyond, SearchResult
    from perfmodel.planning.layouts._robust import Robustness, robustness, square_root
    from perfmodel.planning.layouts._search import search
    from perfmodel.planning.layouts._space import (
        SearchSpace,
        default_space,
        restrict,
        with_options,
        with_schedules,
    )
    from perfmodel.planning.layouts._telling import (
        MeasurementValue,
        MeasurementValues,
        Observation,
        expected_given,
        runs_and_pairs,
        telling,
        weighed,
    )
    from perfmodel.planning.layouts._text import (
        interval,
        layout_last,
        print_pareto,
        print_search,
    )
    from perfmodel.planning.layouts._words import (
        SEARCH_WORDS,
        SearchKeywords,
        SearchOptions,
        SpaceWords,
        Tariff,
        file_words,
        worded,
    )

__getattr__, __dir__ = lazy_names(__name__)
