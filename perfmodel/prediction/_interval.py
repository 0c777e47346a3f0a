"""The 90 % interval of a prediction, and what is uncertain of it by source: layouts share most sources, and what they
share cancels between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._adjustment import Adjustment, factors_of
from perfmodel.prediction._explain import CriticalPath
from perfmodel.prediction._population import CLASSES, DEGREES, Belief
from perfmodel.prediction._prediction import Prediction
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._sensitivity import step_derivatives
from perfmodel.prediction._step_costs import layout_coordinates
from perfmodel.spec import Layout

GAUSS_90 = 1.6448536269514722
"""95 % quantile of the normal distribution: half-width of a 90 % interval in standard deviations."""
OWN = "own"
"""Source that no two layouts share: the noise between one run and another."""


def step_interval(
    problem: StepProblem, layout: Layout, path: CriticalPath, degrees: Mapping[str, float]
) -> tuple[tuple[float, float], dict[str, float]]:
    """Ends of the 90 % interval as factors of the step time, and where it comes from
    (`Prediction.error_sources`). On several kinds of nodes: as of the kind of which least is known.

    Args:
        degrees: of `DEGREES`.
    """
    if problem.kinds:
        return max((_before_runs(one, path, degrees) for one in problem.kinds), key=lambda found: found[0][1])
    known = problem.adjustment
    if known is not None and known.offsets is not None:
        widest = _before_runs(problem, path, degrees)[0]
        return _from_runs(problem, known, layout, path, log(widest[1]))
    return _before_runs(problem, path, degrees)


def _before_runs(
    problem: StepProblem, path: CriticalPath, degrees: Mapping[str, float]
) -> tuple[tuple[float, float], dict[str, float]]:
    """What the published record says of a site without runs."""
    belief = problem.site.belief(problem.framework, problem.cluster.device)
    sources = {f"events: {name}": belief.events * half / GAUSS_90 for name, half in path.family_half_widths().items()}
    shares = path.class_shares()
    loads = np.array([shares[name] for name in CLASSES]) @ belief.root
    sources |= {f"site: {name}": float(load) for name, load in zip(CLASSES, loads, strict=True)}
    sources |= {f"site: {name}": float(sd) * degrees[name] for name, sd in zip(DEGREES, belief.degrees, strict=True)}
    apart = sum(sd**2 for name, sd in sources.items() if name.removeprefix("site: ") not in CLASSES)
    half = belief.half_width(shares, apart)
    return (exp(-half), exp(half)), sources | {OWN: belief.noise}


def student_half_width(variance: float, degrees_of_freedom: float) -> float:
    """Of the 90 % interval of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, 0.95)) * variance**0.5


def _from_runs(
    problem: StepProblem, adjustment: Adjustment, layout: Layout, path: CriticalPath, widest: float
) -> tuple[tuple[float, float], dict[str, float]]:
    """Ends of the 90 % interval as factors of the step time (Laplace's approximation), and where it comes
    from, as `Prediction.error_sources`.

    The variance of the log step time has four parts: what the runs left open of the fitted parameters
    (g' C g with the gradient g of the log step time), what makes events of this step less certain than
    those of the runs (parameters that no run touched count in full), what is unknown of layouts this far
    from the runs, and the noise between one run and another. Together they are no wider than the half-width `widest`
    before any run, unless the runs scatter more themselves: it holds what sites differ in, so runs can only narrow it.
    """
    derivatives = step_derivatives(problem, [layout], adjustment.names)
    gradient = derivatives.by_parameter[0] / derivatives.step_s[0]
    wider = adjustment.scale**0.5
    sources = {
        f"events: {name}": wider * sd for name, sd in _events_beyond_runs(adjustment, path, derivatives.step_s[0])
    }
    if adjustment.covariance:
        # independent combinations of parameters: the columns of a root of their covariance
        values, vectors = np.linalg.eigh(np.asarray(adjustment.covariance))
        loads = wider * gradient @ (vectors * np.sqrt(np.maximum(values, 0.0)))
        sources |= {f"fit: {i}": float(load) for i, load in enumerate(loads)}
    sources[OWN] = wider * adjustment.noise
    variance = sum(sd**2 for sd in sources.values())
    if adjustment.offsets is not None:
        variance += adjustment.scale * adjustment.offsets.spread(layout_coordinates(problem.setting, layout))
    half = student_half_width(variance, adjustment.degrees_of_freedom)
    least = student_half_width(sources[OWN] ** 2, adjustment.degrees_of_freedom)
    kept = min(1.0, max(least, widest) / half)
    return (exp(-half * kept), exp(half * kept)), {name: sd * kept for name, sd in sources.items()}


def _events_beyond_runs(adjustment: Adjustment, path: CriticalPath, step_s: float) -> list[tuple[str, float]]:
    """Standard deviations from events whose own intervals are wider than those of the runs' events."""
    seen = dict(adjustment.half_width)
    share: dict[str, float] = {}
    for op, seconds, half in zip(path.ops, path.seconds.tolist(), path.half_width.tolist(), strict=True):
        name = factors_of(op)[1]
        beyond = max(0.0, half**2 - seen.get(name, 0.0) ** 2) ** 0.5
        share[name] = share.get(name, 0.0) + seconds * beyond / step_s
    return [(name, value / GAUSS_90) for name, value in share.items()]


def shared_errors(
    predictions: Sequence[Prediction | Mapping[str, float]],
) -> tuple[list[str], Float[np.ndarray, "layouts sources"], Float[np.ndarray, " layouts"]]:
    """Names of the sources of error that layouts share, standard deviations of each layout's log step time from them,
    and those from the noise between one run and another; of predictions or of their `error_sources`."""
    told = [p.error_sources if isinstance(p, Prediction) else p for p in predictions]
    names = sorted({name for one in told for name in one if name != OWN})
    shared = np.array([[one.get(name, 0.0) for name in names] for one in told])
    own = np.array([one.get(OWN, 0.0) for one in told])
    return names, shared.reshape(len(predictions), len(names)), own


@dataclass(frozen=True, eq=False)
class Joint:
    """Distribution of the logarithms of the step times of some layouts about their predictions: a mixture of Student's
    t distributions."""

    covariance: Float[np.ndarray, "nodes layouts layouts"]
    weight: Float[np.ndarray, " nodes"]
    degrees_of_freedom: float

    def below(self, gap: Float[np.ndarray, "layouts layouts"]) -> Float[np.ndarray, "layouts layouts"]:
        """Probability that the log of the row's layout less that of the column's is off by less than `gap`."""
        from scipy.special import stdtr

        variance = np.diagonal(self.covariance, axis1=1, axis2=2)
        apart = variance[:, :, None] + variance[:, None] - 2 * self.covariance
        z = gap / np.sqrt(np.maximum(apart, 1e-12))
        return np.tensordot(self.weight, stdtr(self.degrees_of_freedom, z), 1)


def joint_errors(problem: StepProblem, predictions: Sequence[Prediction]) -> Joint:
    """Of some layouts of one problem: what all sites differ in cancels as far as layouts spend alike on it; how much
    one site's layouts scatter beyond is unknown, and the same for all of them (`Scales`)."""
    known = problem.adjustment
    if known is not None and known.offsets is not None:
        return Joint(log_covariance(problem, predictions)[None], np.ones(1), known.degrees_of_freedom)
    names, shared, own = shared_errors(predictions)
    where = np.array([layout_coordinates(problem.setting, p.layout) for p in predictions])
    return joint_of(problem.site.belief(problem.framework, problem.cluster.device), names, shared, own, where)


def joint_of(
    belief: Belief,
    names: Sequence[str],
    shared: Float[np.ndarray, "layouts sources"],
    own: Float[np.ndarray, " layouts"],
    where: Float[np.ndarray, "layouts coordinates"],
) -> Joint:
    """`joint_errors` before any run, from what `shared_errors` gives and the layouts' coordinates."""
    of_site = np.array([name.removeprefix("site: ") in CLASSES for name in names], bool)
    alike, scales = belief.likeness.of(where), belief.scales
    repeats = belief.likeness.own**2 * (alike > belief.likeness.near**2)
    within = shared[:, ~of_site] @ shared[:, ~of_site].T + alike - repeats
    single = repeats + np.diag(own**2)
    parts = np.stack([within, single])
    covariance = shared[:, of_site] @ shared[:, of_site].T + np.einsum(
        "pn,pij->nij", np.stack([scales.within, scales.own]), parts
    )
    return Joint(covariance, scales.weight, np.inf)


def log_covariance(problem: StepProblem, predictions: Sequence[Prediction]) -> Float[np.ndarray, "layouts layouts"]:
    """Covariance of the logarithms of the step times of some layouts of one problem.

    Sum over sources of sd_i sd_j, as `Prediction.error_sources` has them (errors of an op family, of a fitted parameter
    and of the framework are common to all layouts, in proportion to what each spends there), the runs' own noise on
    the diagonal, and what layouts near one another share.
    """
    _, shared, own = shared_errors(predictions)
    found = shared @ shared.T + np.diag(own**2)
    if not predictions:
        return found
    known = problem.adjustment
    where = [layout_coordinates(problem.setting, p.layout) for p in predictions]
    if known is not None and known.offsets is not None:
        return found + known.scale * known.offsets.joint(where)
    return found + problem.site.belief(problem.framework, problem.cluster.device).likeness.of(np.array(where))
