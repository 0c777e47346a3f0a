"""Which part of the machine to upgrade first: gains with the layout kept, and with the best one searched anew."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from perfmodel.display import frame_html
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.layouts import Goal, Progress, Question, fastest
from perfmodel.planning.what_if import HARDWARE, Scenario, Setting, in_scenario, step_s

if TYPE_CHECKING:
    import pandas as pd

PARAMETERS: Final = (*HARDWARE, "memory_bytes")


@dataclass(frozen=True)
class Upgrade:
    """One parameter made better."""

    parameter: str
    change: str
    """Such as `+10%`; of a latency the same less."""
    elasticity: float
    """d log(step time) / d log(parameter) at the best layout. By the envelope theorem also that of the best step time
    over all layouts, wherever the best layout is unique."""
    kept_gain: float
    """Share of the step time saved with the layout kept."""
    gain: float
    """Share saved by the layout that is then the best."""
    layout: str
    """That layout."""
    changes_layout: bool
    price: float | None = None
    """Of the change."""
    gain_per_price: float | None = None


@dataclass(frozen=True)
class Upgrades:
    """All parameters, the most worthwhile first."""

    layout: str
    """The best layout of the machine as it is."""
    step_time_s: float
    share: float
    upgrades: tuple[Upgrade, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per parameter."""
        import pandas as pd

        return pd.DataFrame([asdict(upgrade) for upgrade in self.upgrades])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def rank_upgrades(
    question: Question,
    *,
    share: float = 0.1,
    prices: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Upgrades:
    """What a better parameter of the machine saves, layout by layout: every parameter by itself.

    Args:
        question: what to lay out; its space is searched again on every machine, exactly.
        share: by which a bandwidth, a rate or the memory is raised, and a latency lowered.
        prices: of each such change, in any unit; those left out are not ranked by money.
        progress: told what is being done.

    Raises:
        LayoutError: no layout fits on the machine as it is.
        PerfModelError: a share that is not between 0 and 1, a price not above 0, a parameter that there is not.
    """
    if not 0 < share < 1:
        raise PerfModelError(f"design: the share must be between 0 and 1, got {share:g}")
    for name, price in (prices or {}).items():
        if name not in PARAMETERS:
            raise UnknownNameError("parameter", name, PARAMETERS)
        if not price > 0:
            raise PerfModelError(f"design: the price of {name} must be above 0, got {price:g}")
    goal = Goal.parse(question.step_problem)
    now = fastest(question, goal)
    if now is None:
        name = question.problem.model.name
        raise LayoutError(f"no layout of {name} fits on {question.devices} devices; see `search`")
    problem, before_s = question.step_problem, step_s(question.step_problem, now.layout, Scenario())
    slopes = in_scenario(problem, now.layout, Scenario()).sensitivity
    found = []
    for done, name in enumerate(PARAMETERS):
        if progress:
            progress(f"search with better {name}", done, len(PARAMETERS))
        less = name.endswith("latency")
        scenario = Scenario((Setting(name, "times", 1 - share if less else 1 + share),))
        better = question.in_scenario(scenario)
        then = fastest(better, Goal.parse(better.step_problem))
        kept_s = before_s if name == "memory_bytes" else step_s(problem, now.layout, scenario)
        best_s, layout = kept_s, now.layout
        if then is not None and then.layout != now.layout:
            then_s = step_s(better.step_problem, then.layout, Scenario())
            best_s, layout = (then_s, then.layout) if then_s < kept_s else (best_s, layout)
        gain, price = 1 - best_s / before_s, (prices or {}).get(name)
        found.append(
            Upgrade(
                name, f"{-share if less else share:+.0%}", slopes.get(name, 0.0), 1 - kept_s / before_s, gain,
                str(layout), layout != now.layout, price, price and gain / price,
            )
        )  # fmt: skip
    key = (lambda u: (-(u.gain_per_price or 0.0), -u.gain)) if prices else (lambda u: (-u.gain,))
    return Upgrades(str(now.layout), before_s, share, tuple(sorted(found, key=key)))
