"""Regressors of kernel times: features, base time, training, intervals, weights files. JAX only on use."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.cost.learn._collective_fit import Sources
    from perfmodel.cost.learn._collective_physics import LinkConstants, collective_time, least_volume
    from perfmodel.cost.learn._collective_price import (
        CollectivePrices,
        CollectiveRequest,
        Groups,
        Priced,
        predict_collective_rows,
    )
    from perfmodel.cost.learn._collective_rows import collective_rows, counted, set_aside
    from perfmodel.cost.learn._collective_studies import LeftOut, Study, study_collectives
    from perfmodel.cost.learn._collective_weights import CollectiveWeights, collective_weights
    from perfmodel.cost.learn._fabrics import Fabric, device_name
    from perfmodel.cost.learn._fit import fit, fit_calibration, fit_collectives
    from perfmodel.cost.learn._gradients import added, gradient_products
    from perfmodel.cost.learn._intervals import absolute_percent
    from perfmodel.cost.learn._links import is_flat, is_known, is_network, link_class
    from perfmodel.cost.learn._moe_alltoall import MOE_KINDS, MoeRows, moe_rows, predict_moe
    from perfmodel.cost.learn._parameters import Inputs, Parameters, power_join
    from perfmodel.cost.learn._queries import (
        PROVENANCE,
        Prediction,
        PriceQuery,
        Query,
        kernel_physics,
        table_rows,
        with_half_batches,
    )
    from perfmodel.cost.learn._recipe import Recipe, read_recipe
    from perfmodel.cost.learn._records import calibration_files, describe_calibration, kernel_records, measured_kinds
    from perfmodel.cost.learn._regressor import Regressor
    from perfmodel.cost.learn._rows import Rows, in_16_bits, rows_from_ops
    from perfmodel.cost.learn._stack import Figures
    from perfmodel.cost.learn._tables import Samples, gather, split
    from perfmodel.cost.learn._weights import (
        END_TO_END_FILE,
        WeightFiles,
        load_family,
        load_regressor,
        read_header,
        save_regressor,
        shipped_folder,
        weight_files,
        weights_folder,
    )

__getattr__, __dir__ = lazy_names(__name__)
