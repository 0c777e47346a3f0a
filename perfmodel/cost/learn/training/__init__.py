"""Training of the regressors of kernel times: recipe, base time by least squares, networks, and
held-out errors."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.cost.learn.training._base import fit_base
    from perfmodel.cost.learn.training._fit import (
        fit,
        fit_calibration,
        fit_collectives,
        fit_regressor,
        measured_held_shares,
        slowdowns_by_state,
    )
    from perfmodel.cost.learn.training._network import member
    from perfmodel.cost.learn.training._recipe import Recipe, Stages, read_recipe
    from perfmodel.cost.learn.training._tables import Samples, gather, may_be_fitted, split
    from perfmodel.cost.learn.training._train import Training, train, train_members

__getattr__, __dir__ = lazy_names(__name__)
