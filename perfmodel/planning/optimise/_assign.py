"""Integer programming: experts, chunks or replicas on unequal devices, in any order."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise._contiguous import NothingFitsError, relative_gap


@dataclass(frozen=True)
class Assignment:
    """An assignment of items to devices."""

    device: tuple[int, ...]
    """Device that each item is assigned to."""
    value_s: float
    """Seconds of the busiest device."""
    lower_bound_s: float
    """The solver's lower bound on the value over all assignments."""

    @property
    def gap(self) -> float:
        """Largest relative distance of the value from the lower bound; 0 if proved optimal."""
        return relative_gap(self.value_s, self.lower_bound_s)


def assign(
    seconds: Float[np.ndarray, "devices items"],
    n_bytes: Float[np.ndarray, " items"] | None = None,
    capacity_bytes: Float[np.ndarray, " devices"] | None = None,
    *,
    time_limit_s: float = 10.0,
) -> Assignment:
    """Assign each item to a device to minimise the load of the busiest one, within memory.

    min T subject to sum over items of seconds * x <= T and of bytes * x <= capacity on every
    device, x in {0, 1}, each item once (unrelated machines, Lenstra et al. 1990), by SciPy's HiGHS.

    Args:
        seconds: seconds of each item on each device; `inf` where it cannot go.
        n_bytes, capacity_bytes: memory of items and devices; none: no limit.
        time_limit_s: seconds after which the best so far is returned with its gap.

    Raises:
        NothingFitsError: no assignment keeps the limits, or none was found in time.
        PerfModelError: arrays that do not belong together.
    """
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array

    devices, items = seconds.shape
    states_one_only = (n_bytes is None) != (capacity_bytes is None)
    if states_one_only or (n_bytes is not None and n_bytes.shape != (items,)):
        raise PerfModelError(
            f"assign: give both the bytes of {items} items and the capacities of {devices} devices, or neither"
        )
    allowed = np.isfinite(seconds)

    # HiGHS' tolerances are absolute, and seconds may be microseconds: scale the longest time to
    # 1.
    scale = float(np.where(allowed, seconds, 0.0).max()) or 1.0
    n = devices * items
    device, item = np.divmod(np.arange(n), items)
    # Unknowns are x[device, item] row by row, and T, the load of the busiest device, last.
    time = np.where(allowed, seconds / scale, 0.0).ravel()

    # Each item goes to one device, and each device's load is at most T.
    once = coo_array((np.ones(n), (item, np.arange(n))), shape=(items, n + 1))
    load = coo_array(
        (
            np.append(time, -np.ones(devices)),
            (np.append(device, np.arange(devices)), np.append(np.arange(n), [n] * devices)),
        ),
        shape=(devices, n + 1),
    )
    constraints = [
        LinearConstraint(once.tocsr(), 1, 1),
        LinearConstraint(load.tocsr(), -np.inf, 0),
    ]
    if n_bytes is not None and capacity_bytes is not None:
        share = n_bytes[item] / capacity_bytes[device]
        device_memory = coo_array((share, (device, np.arange(n))), shape=(devices, n + 1))
        constraints.append(LinearConstraint(device_memory.tocsr(), -np.inf, 1))
    solution = milp(
        np.append(np.zeros(n), 1.0),
        integrality=np.append(np.ones(n), 0),
        bounds=(np.zeros(n + 1), np.append(allowed.ravel().astype(float), np.inf)),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if solution.x is None:
        raise NothingFitsError(
            f"assign: no assignment of {items} items to {devices} devices was found that fits; give more memory, "
            "or more time"
        )

    # Solvers return 0.9999 for 1. Recompute the loads from the rounded choice in double
    # precision; the bound may exceed them by the tolerance only.
    chosen = solution.x[:n].reshape(devices, items).argmax(axis=0)
    loads = np.bincount(chosen, seconds[chosen, np.arange(items)], minlength=devices)
    bound_s = min(float(solution.mip_dual_bound) * scale, float(loads.max()))
    return Assignment(tuple(chosen.tolist()), float(loads.max()), bound_s)
