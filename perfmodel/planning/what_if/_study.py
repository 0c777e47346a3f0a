"""What-if studies: before and after, sensitivities, sweeps, and hidden delays."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np
from jaxtyping import Float

from perfmodel import catalog
from perfmodel.cost import has_power_law
from perfmodel.display import frame_html, whatif_html
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.planning.what_if._scenario import (
    HARDWARE,
    DelayedCollectives,
    ScaledKernels,
    Scenario,
    Setting,
    parse_setting,
)
from perfmodel.prediction import (
    StepProblem,
    check_layout,
    layout_batches,
    layout_of,
    step_problem_of,
)
from perfmodel.prediction.composition import step_programs, step_time_s
from perfmodel.prediction.memory import fit_probabilities, peak_memory
from perfmodel.program import N_STREAMS, Stream
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.spec.keywords import StepKeywords
from perfmodel.units import duration

if TYPE_CHECKING:
    import pandas as pd

_STEP = 0.01
"""Relative change of a parameter for finite differences."""
_HELD_BACK = 0.02
"""Share of the step that a power limit must take to be named."""
_HIDDEN = 1e-3
"""A delay is hidden as long as the step grows by no more than this share."""

MOST_POINTS: Final = 10_000
"""Most points of a sweep, each of which needs a separate evaluation."""


@dataclass(frozen=True)
class WhatIf:
    """The step of a layout on the unchanged machine and in a scenario."""

    settings: tuple[str, ...]
    """Settings of the scenario in words."""
    before_s: float
    """Step time as it is."""
    after_s: float
    """Step time in the scenario."""
    fits_before: bool
    """Whether the layout fits into memory as it is."""
    fits_after: bool
    """Whether it fits in the scenario."""
    fits_probability_before: float
    """Probability that every rank fits into its device's memory (`Prediction.fits_probability`)."""
    fits_probability_after: float
    """The same probability in the scenario."""
    sensitivity: dict[str, float]
    """d log(step time) / d log(parameter) in the scenario: -0.3 means that 1 % more makes the step
    0.3 % shorter."""
    notes: tuple[str, ...] = ()
    """Why a setting gains less than one might expect, in words."""

    @property
    def change(self) -> float:
        """Relative change of the step time."""
        return self.after_s / self.before_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {
            "settings": list(self.settings),
            "notes": list(self.notes),
            "before": {
                "step_time_s": self.before_s,
                "fits": self.fits_before,
                "fits_probability": self.fits_probability_before,
            },
            "after": {
                "step_time_s": self.after_s,
                "fits": self.fits_after,
                "fits_probability": self.fits_probability_after,
            },
            "change": self.change,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per parameter with its sensitivity, largest effect first."""
        import pandas as pd

        frame = pd.DataFrame(
            {
                "parameter": list(self.sensitivity),
                "sensitivity": list(self.sensitivity.values()),
            }
        )
        return frame.sort_values("sensitivity", key=lambda s: -s.abs(), ignore_index=True)

    def _repr_html_(self) -> str:
        return whatif_html(self.to_dict())


@dataclass(frozen=True)
class Curve:
    """Step time against one parameter."""

    name: str
    """Name of the parameter."""
    values: tuple[float, ...]
    """Values, or multiples, of the parameter."""
    multiple: bool
    """Whether the values are multiples of the present value."""
    step_s: tuple[float, ...]
    """Step time at each value of the parameter."""
    hidden_up_to: float | None
    """Largest value of a delay that the step does not feel (within 0.1 %); None for other
    parameters."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per value: value, step_s."""
        import pandas as pd

        return pd.DataFrame({self.name: self.values, "step_s": self.step_s})

    def _repr_html_(self) -> str:
        hidden = "" if self.hidden_up_to is None else f"hidden up to {duration(self.hidden_up_to)}"
        return frame_html(self.to_frame(), hidden)


def whatif(
    model: "str | Model | Problem",
    cluster: "str | Cluster | None" = None,
    layout: catalog.StatedLayout = "",
    settings: Sequence[str] = (),
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    calibration: Path | str | None = None,
    **fields: Unpack[StepKeywords],
) -> WhatIf:
    """Compare the step time before and after a change of the machine.

    Arguments that are not listed here are those of `perfmodel.predict`.

    Args:
        settings: such as `"inter_node_bandwidth=2x"`, see `parse_setting`.
    """
    stated = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "devices": devices,
    }
    stated |= {"job": job, "framework": framework}
    problem, layout = catalog.problem_and_layout(model, cluster, layout, **stated, **fields)
    laid_out, _ = layout_of(problem, layout)
    return in_scenario(step_problem_of(problem, calibration), laid_out, Scenario.parse(settings))


def in_scenario(problem: StepProblem, layout: Layout, scenario: Scenario) -> WhatIf:
    """Compute the step time before and after, and the sensitivity to each parameter of the machine.

    Sensitivities are central differences of this step, not gradients of
    `perfmodel.step_time_function`. Here kernels follow the roofline when the machine changes
    (`ScaledKernels`); there they follow the cost models, in which a measured kernel keeps its time.
    That function also has no parameters for delays and slow ranks.

    Args:
        problem: model, job, cluster and cost models as they are.
        layout: the layout.
        scenario: changes of the machine.

    Raises:
        LayoutError: a layout that cannot run, or a slow rank outside the pipeline.
    """
    check_layout(problem.model, problem.cluster, problem.job, layout)

    # Central differences of log step time by log parameter.
    sensitivity = {}
    for name in HARDWARE:
        below_s = step_s(problem, layout, scenario.scaled(name, 1 - _STEP))
        above_s = step_s(problem, layout, scenario.scaled(name, 1 + _STEP))
        sensitivity[name] = float(np.log(above_s / below_s) / np.log((1 + _STEP) / (1 - _STEP)))
    after_s = step_s(problem, layout, scenario)
    return WhatIf(
        settings=tuple(map(str, scenario.settings)),
        before_s=step_s(problem, layout, Scenario()),
        after_s=after_s,
        fits_before=_fits(problem, layout, Scenario()),
        fits_after=_fits(problem, layout, scenario),
        fits_probability_before=_fit_probability(problem, layout, Scenario()),
        fits_probability_after=_fit_probability(problem, layout, scenario),
        sensitivity=sensitivity,
        notes=_held_back(problem, layout, scenario, after_s),
    )


def _held_back(
    problem: StepProblem, layout: Layout, scenario: Scenario, after_s: float
) -> tuple[str, ...]:
    """A sentence on the power limit, where it holds a faster device back; else none."""
    # Evaluate the step once more without the power limit. The limit holds it back only if that is
    # noticeably faster.
    device = scenario.cluster(problem.cluster).device
    if not has_power_law(device) or device.power_w is None or not problem.site.power_limited:
        return ()
    free_s = step_s(
        replace(problem, site=replace(problem.site, power_limited=False)), layout, scenario
    )
    if free_s > after_s * (1 - _HELD_BACK):
        return ()
    freed = f"{duration(free_s)} ({free_s / after_s - 1:+.1%})"
    return (
        f"matrix multiplies are held back by the power limit of {device.power_w:,.0f} W, so raising compute_rate "
        f"alone has little effect: without the limit the step would take {freed}; also pass power_limit=2x",
    )


def sweep(
    problem: StepProblem, layout: Layout, scenario: Scenario, settings: Sequence[Setting]
) -> Curve:
    """Compute step times over values of one parameter, with the scenario's other settings."""
    check_layout(problem.model, problem.cluster, problem.job, layout)
    name = settings[0].name
    spans = tuple(step_s(problem, layout, scenario.and_also(setting)) for setting in settings)
    hidden = _hidden_up_to(problem, layout, scenario, name) if name.endswith("_delay_s") else None
    return Curve(name, tuple(s.value for s in settings), settings[0].how == "times", spans, hidden)


_SWEEP: Final = re.compile(r"(?P<first>[^:]*):(?P<last>[^:]*):\s*(?P<count>\d+)\s*")


def parse_sweep(text: str) -> list[Setting]:
    """Parse `name=first:last:count`, such as `all_reduce_delay_s=0:0.01:11` or
    `inter_node_bandwidth=0.5x:4x:8`.

    Raises:
        UnknownNameError, PerfModelError: as `parse_setting`; or an invalid range.
    """
    name, _, raw = text.partition("=")
    sweep = _SWEEP.fullmatch(raw)
    count = int(sweep["count"]) if sweep else 0
    if sweep is None or count < 2:
        raise PerfModelError(
            f"what-if: a sweep is name=first:last:count, like {name}=0:0.01:11; got {text!r}"
        )
    # Every point is a prediction: a slip in the number would keep its user waiting for hours.
    if count > MOST_POINTS:
        raise PerfModelError(f"what-if: a sweep has at most {MOST_POINTS:,} points; got {text!r}")
    first = parse_setting(f"{name}={sweep['first']}")
    last = parse_setting(f"{name}={sweep['last']}")
    if first.how != last.how:
        raise PerfModelError(
            f"what-if: give both ends of the sweep {text!r} as values, or both as multiples"
        )
    points = np.linspace(first.value, last.value, count)
    return [Setting(first.name, first.how, float(point)) for point in points]


def step_s(problem: StepProblem, layout: Layout, scenario: Scenario) -> float:
    """Compute the step time of a layout in a scenario."""
    # Everything but a slow rank changes prices. A slow rank changes durations of one rank's
    # classes after pricing.
    model = model_in_scenario(problem, scenario)
    (batch,) = layout_batches(model, [layout])
    (programs,), slowed = step_programs(model, [layout]), scenario.slowed(layout.pp)
    if slowed is not None:
        if batch.spec.replicas > 1:
            raise LayoutError(
                f"what-if: slow_rank needs a schedule without replicas, not {layout.schedule}"
            )
        slowed_programs = []
        for program in programs:
            factors = _slower(program.prepared.structure, *slowed)
            slowed_programs.append(program._replace(durations_s=program.durations_s * factors))
        programs = slowed_programs
    # Samples come as fast as before, whatever the hardware.
    return problem.job.paced_s(step_time_s(programs))


def _slower(structure: Any, rank: int, factor: float) -> Float[np.ndarray, " classes"]:
    """Factors on the classes' durations: those on the slow rank's compute stream take longer."""
    # A class of passes belongs to one stage, so that stretching the classes of a rank's compute
    # stream slows this rank alone.
    on_rank = structure.stream == rank * N_STREAMS + Stream.COMPUTE
    factors = np.ones(structure.n_classes)
    factors[np.unique(structure.duration[on_rank])] = factor
    return factors


def model_in_scenario(problem: StepProblem, scenario: Scenario) -> StepProblem:
    """The step model of the scenario's machine (without a slow rank)."""
    device = scenario.device(problem.cluster.device)
    cluster = scenario.cluster(problem.cluster)
    if device == problem.cluster.device:
        kernels = problem.kernels
    else:
        kernels = ScaledKernels(problem.kernels, device)

    # Slowdowns measured under one power limit do not hold under another. There, the energies of the
    # die are used.
    same_power = device.power_w == problem.cluster.device.power_w
    site = problem.site if same_power else replace(problem.site, loads=())
    collectives = problem.collectives
    if scenario.delays_s:
        collectives = DelayedCollectives(problem.collectives, scenario.delays_s)
    return StepProblem(
        model=problem.model,
        job=problem.job,
        cluster=cluster,
        kernels=kernels,
        collectives=collectives,
        framework=scenario.framework(problem.framework),
        site=site,
        adjustment=problem.adjustment,
    )


def _fits(problem: StepProblem, layout: Layout, scenario: Scenario) -> bool:
    peak, _ = peak_memory(problem, [layout])
    capacity = scenario.device(problem.cluster.device).memory_bytes
    return bool(peak[0] <= problem.framework.memory.usable_bytes(capacity))


def _fit_probability(problem: StepProblem, layout: Layout, scenario: Scenario) -> float:
    """Probability that a layout fits into the memory of the scenario's machine."""
    if not scenario.settings:
        return fit_probabilities(problem, [layout])[0]
    changed = model_in_scenario(problem, scenario)
    # Prices follow a scenario's device by themselves; memory is the cluster's device's.
    memory_bytes = scenario.device(problem.cluster.device).memory_bytes
    device = replace(changed.cluster.device, memory_bytes=memory_bytes)
    cluster = replace(changed.cluster, device=device)
    return fit_probabilities(replace(changed, cluster=cluster), [layout])[0]


def _hidden_up_to(problem: StepProblem, layout: Layout, scenario: Scenario, name: str) -> float:
    """Return the delay at which the curve leaves its flat part, by bisection."""
    none = step_s(problem, layout, scenario.and_also(Setting(name, "to", 0.0)))

    def felt(delay_s: float) -> bool:
        return step_s(problem, layout, scenario.and_also(Setting(name, "to", delay_s))) > none * (
            1 + _HIDDEN
        )

    # A delay as long as the whole step is an upper end. 20 halvings locate the knee to a
    # millionth of the step.
    low, high = 0.0, none
    if not felt(high):
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if felt(middle) else (middle, high)
    return low
