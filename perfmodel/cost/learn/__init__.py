"""Regressors of kernel times: queries, weights files, and records of measurements.

JAX is imported on use alone. Beside this door are:

- `collectives`: times of collectives;
- `training`: how regressors are fitted to tables;
- `rows`, `stack`, `plans`: a kernel as numbers, what is known of its device, and which measurements
  stand in for it;
- `parameters`, `intervals`: the physics whose constants are learned, and how wide an answer's
  interval is.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.cost.learn._gradients import added, gradient_products
    from perfmodel.cost.learn._queries import (
        PROVENANCE,
        Prediction,
        PriceQuery,
        Query,
        kernel_physics,
        table_rows,
        with_half_batches,
    )
    from perfmodel.cost.learn._records import (
        calibration_files,
        describe_calibration,
        kernel_records,
        measured_kinds,
    )
    from perfmodel.cost.learn._regressor import Regressor
    from perfmodel.cost.learn._weights import (
        END_TO_END_FILE,
        MeasuredLoad,
        WeightFiles,
        load_family,
        load_regressor,
        measured_loads,
        measured_sm_share,
        read_header,
        save_regressor,
        shipped_folder,
        weight_files,
        weights_folder,
    )
    from perfmodel.cost.learn.training._fit import fit_calibration

__getattr__, __dir__ = lazy_names(__name__)
