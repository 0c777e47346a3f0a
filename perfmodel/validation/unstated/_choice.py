"""An open choice of a run, besides its degrees, and its possible values.

A choice knows whether a run states it, what value a run has, and the run with every value that its
framework can run. How likely the values are is learned from published runs that state them
(`perfmodel.validation.unstated.priors`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from perfmodel.spec import Cluster
from perfmodel.validation.rows import Case
from perfmodel.validation.unstated._features import RunFeatures
from perfmodel.validation.unstated.priors import ChoicePriors

Chain = tuple[tuple[str, ...], ...]
"""Names of features (`RunFeatures`) of each context, from general to special."""
OF_FRAMEWORK: Final[Chain] = (("era",), ("framework",))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One value of a choice, and the settings that it implies."""

    value: str
    """What this variant chooses."""
    counted_as: str = ""
    """Value as which published runs are counted, which may be coarser; empty if it equals
    `value`."""
    share: float = 1.0
    """Share of this value in the probability of `counted_as`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the layout that it sets."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job that it sets."""
    cluster: Cluster | None = None
    """Cluster in place of the run's."""

    def applied(self, case: Case) -> Case:
        """A run with this value.

        Raises:
            PerfModelError: the run cannot have it.
        """
        changed = case.relaid(**self.layout) if self.layout else case
        changed = changed.with_job(**self.job) if self.job else changed
        return changed if self.cluster is None else replace(changed, cluster=self.cluster)


class OpenChoice(ABC):
    """One choice of a run, such as its recomputation."""

    name: str
    chain: Chain = OF_FRAMEWORK
    takes_memory: bool = True
    """Whether the choice decides how much memory a run needs."""
    tunable: bool = True
    """Whether users of the framework can choose freely, and so prefer the faster value."""

    @abstractmethod
    def matters(self, case: Case) -> bool:
        """Whether the choice is relevant for the run."""

    @abstractmethod
    def stated(self, case: Case) -> bool:
        """Whether the run states it."""

    @abstractmethod
    def value(self, case: Case) -> str:
        """The run's value, in the form in which published runs are counted."""

    @abstractmethod
    def variants(self, case: Case) -> Sequence[Variant]:
        """The values that the run's framework can run."""

    def weighted(
        self, case: Case, features: RunFeatures, priors: ChoicePriors
    ) -> list[tuple[Variant, float]]:
        """Possible values with prior probabilities; empty if the run states the choice."""
        if self.stated(case) or not self.matters(case):
            return []
        variants = self.variants(case)
        if len(variants) == 1:
            return [(variants[0], 1.0)]

        # Several variants may be counted as one value in published runs. The value's probability
        # is divided among them by `share`.
        values = tuple(dict.fromkeys(variant.counted_as or variant.value for variant in variants))
        probabilities = priors.probabilities(
            self.name, features.contexts(self.chain), values, self.usual(case)
        )
        probability_of = dict(zip(values, probabilities.tolist(), strict=True))
        return [
            (variant, variant.share * probability_of[variant.counted_as or variant.value])
            for variant in variants
        ]

    def usual(self, case: Case) -> str | None:
        """Return the framework's default value."""
        return None if self.stated(case) else self.value(case)


def on_or_off(choice: bool) -> str:
    return "on" if choice else "off"
