"""Beliefs about times of events: a Gaussian process over shapes, given measurements."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.calibration.beliefs._beliefs import (
        NOISE,
        SHORT_NOISE,
        Base,
        Beliefs,
        Events,
        condition,
        points_of,
        take,
    )
    from perfmodel.calibration.beliefs._covariance import (
        Component,
        Hyperparameters,
        Points,
        correlation,
        covariance,
        fit_hyperparameters,
        pack,
        unpack,
    )

__getattr__, __dir__ = lazy_names(__name__)
