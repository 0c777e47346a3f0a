"""Fits the hierarchical model of sites to held-out runs, and the width of intervals."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.validation.population._card import population_card
    from perfmodel.validation.population._coverage import (
        TEAM,
        LeftOutRuns,
        conformal_scale,
        covered_half_widths,
        fit_coverage,
    )
    from perfmodel.validation.population._few_runs import Covariances, others_given_known
    from perfmodel.validation.population._fit import (
        PopulationFit,
        fit_population,
        parameters_text,
        posterior,
    )
    from perfmodel.validation.population._folds import folds_of, team_folds, whole_group_folds
    from perfmodel.validation.population._score import (
        DEGREES_OF_FREEDOM,
        LEVEL_DEGREES_OF_FREEDOM,
        LEVELS,
        MOST,
        SHARED,
        START,
        Score,
        SiteRuns,
        State,
        factors,
        own_parts,
        unpack,
    )

__getattr__, __dir__ = lazy_names(__name__)
