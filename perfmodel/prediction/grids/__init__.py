"""Grids of layouts: memory and lower bounds of millions of layouts at once, without building any
program."""

from perfmodel.display import shorten_reprs
from perfmodel.prediction.grids._grid import (
    LayoutGrid,
    PipelineChoice,
    RecomputeChoice,
    ShardChoice,
    StateChoice,
)
from perfmodel.prediction.grids._grid_costs import (
    GridCosts,
    lower_bounds_s,
    pass_work_s,
    price_grids,
)

shorten_reprs(__name__)
