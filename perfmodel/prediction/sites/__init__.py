"""Sites: corrections of the cost models by measured runs, and the statistics of how far runs of a site may differ."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction.sites._adjustment import (
    HOST_FACTORS,
    KERNEL_FACTORS,
    LINK_FACTORS,
    LOSSES,
    PARAMETERS,
    SKEW,
    Adjustment,
    factors_of,
    save_adjustments,
)
from perfmodel.prediction.sites._coverage import UNKNOWNS, Coverage, Seen, model_kind
from perfmodel.prediction.sites._fitted_runs import FittedRuns
from perfmodel.prediction.sites._known_runs import (
    OUTLIERS,
    Coordinates,
    CovarianceTerms,
    LayoutKernel,
    Scales,
    half_width,
    known_runs,
    scales,
    standard_nodes,
    widened,
)
from perfmodel.prediction.sites._population import CARD_NAME as POPULATION_CARD
from perfmodel.prediction.sites._population import (
    CLASSES,
    DEGREES,
    GENERIC,
    NEUTRAL,
    SitePopulation,
    SitePrior,
    class_of,
    key,
    population,
)
from perfmodel.prediction.sites._population import FILE_NAME as POPULATION_FILE
from perfmodel.prediction.sites._site_constants import MEMORY_FILE, SUSTAINED_FILE, sustained_from
from perfmodel.prediction.sites._teams import keys_share_a_team, reports_a_problem, source_of_submitter, team_key

shorten_reprs(__name__)
