"""Sites: corrections of the cost models by measured runs, and how much runs of a site vary.

Beside this door are `known_runs` (what measured runs say of others), `constants` (figures fitted to
published runs) and `teams` (whose runs belong together).
"""

from perfmodel.display import shorten_reprs
from perfmodel.prediction.sites._adjustment import (
    HOST_FACTORS,
    KERNEL_FACTORS,
    LINK_FACTORS,
    LOSSES,
    PARAMETERS,
    SKEW,
    Adjustment,
    adjustments,
    factors_of,
    loss_text,
    save_adjustments,
)
from perfmodel.prediction.sites._fitted_runs import FittedRuns
from perfmodel.prediction.sites._population import CARD_NAME as POPULATION_CARD
from perfmodel.prediction.sites._population import (
    CLASSES,
    DEGREES,
    GAUSS_90,
    GENERIC,
    NEUTRAL,
    NOISE,
    LogInterval,
    Seen,
    SitePopulation,
    SitePrior,
    class_of,
    fit_without,
    key,
    model_kind,
    population,
)
from perfmodel.prediction.sites._population import FILE_NAME as POPULATION_FILE
from perfmodel.prediction.sites._site import (
    COMPILED,
    EAGER,
    FORWARD_SHARE,
    STOCK_PRODUCTS,
    Site,
    attention_slowdown,
    framework_slowdown,
)
from perfmodel.prediction.sites.known_runs import UNKNOWNS, Coverage, saturated

shorten_reprs(__name__)
