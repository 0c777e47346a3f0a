"""Times of collectives: the physics of a link, curves of measured series, and their fit.

Beside this door are `links` (classes of links) and `expert_exchanges` (all-to-all of mixtures of
experts).
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.cost.learn.collectives._curves import LARGE
    from perfmodel.cost.learn.collectives._fabrics import Fabric, device_name
    from perfmodel.cost.learn.collectives._fit import NO_SOURCES, Sources, fit_rows
    from perfmodel.cost.learn.collectives._link_constants import Effect, expected
    from perfmodel.cost.learn.collectives._physics import (
        ALGORITHMS,
        KINDS,
        collective_time,
        least_volume,
    )
    from perfmodel.cost.learn.collectives._physics_fit import fit_physics, physical_time
    from perfmodel.cost.learn.collectives._price import (
        NODES,
        RANKS,
        CollectivePrices,
        predict_collective_rows,
    )
    from perfmodel.cost.learn.collectives._requests import CollectiveRequest, Groups, Priced
    from perfmodel.cost.learn.collectives._rows import (
        collective_rows,
        counted,
        set_aside,
        slowdowns,
    )
    from perfmodel.cost.learn.collectives._sharing import sharing_exponents
    from perfmodel.cost.learn.collectives._studies import (
        LeftOut,
        Study,
        at_most,
        fabric_names,
        ranks_fold,
        shape_spread,
        study_collectives,
        usable,
    )
    from perfmodel.cost.learn.collectives._weights import (
        FILE_NAME,
        CollectiveWeights,
        Scope,
        collective_weights,
        save_collective_weights,
    )
    from perfmodel.cost.learn.collectives.links import LinkConstants

__getattr__, __dir__ = lazy_names(__name__)
