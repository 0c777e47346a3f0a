"""Performance recipes of frameworks, and rates of their expert-exchange libraries.

Settings of their published performance recipes, which tables of results leave out: a TOML file has
the recipes of the framework of its name, or of its `frameworks` (see the head of
`data/recipes/megatron-bridge.toml`). And libraries that dispatch tokens to experts: multiprocessors
that they hold, and rates that their authors published, in a file of the dispatcher's name (see the
head of `data/dispatchers/hybridep.toml`).
"""

from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any

from perfmodel.catalog.entries import checked, package_tables
from perfmodel.errors import PerfModelError
from perfmodel.spec import CudaGraphs, Dispatcher, Fp8Recipe, RecomputeModule, WideModule


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Recipe settings for some models and devices; None for open settings."""

    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    """`bf16`, or recipes of narrower element types (`Fp8Recipe`). Empty: all, as for `models` and
    `devices`."""
    since: str = ""
    until: str = ""
    """First and last release, such as `26.04`; empty: all."""
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: int | None = None
    offload_layers: int | None = None
    """Layers whose activations are offloaded to the host, without a pipeline."""
    cuda_graphs: CudaGraphs | None = None
    blocking_launches: bool | None = None
    flash_attention: bool | None = None
    fp8_attention: bool | None = None
    fused_experts: bool | None = None
    wide_modules: tuple[WideModule, ...] | None = None
    wide_last_layers: int | None = None
    shards: int | None = None
    """Devices over which weights are sharded; the other devices hold replicas."""
    expert_dispatcher: Dispatcher | None = None
    ep_overlap: bool | None = None
    tp_overlap: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    fewer_on_last_stage: int | None = None
    """Number of layers by which the last pipeline stage (of all model chunks) is shorter, because
    it also holds the head."""

    def is_of(self, model: str, device: str, dtype: str, release: str) -> bool:
        """Whether the recipe applies to a run with these names."""
        # An empty list of a recipe stands for all names.
        names = ((model, self.models), (device, self.devices), (dtype, self.dtypes))
        if any(listed and name not in listed for name, listed in names):
            return False
        is_early = bool(self.since) and _order(release) < _order(self.since)
        is_late = bool(self.until) and _order(release) > _order(self.until)
        return not is_early and not is_late


_CHOSEN_BY = ("models", "devices", "dtypes", "since", "until")


def recipe(framework: str, model: str, device: str, dtype: str, release: str) -> dict[str, Any]:
    """Fields of `Layout` and `Job` that a framework's performance recipe sets for a model on a
    device.

    `recompute_layers` are whole layers per stage. Empty if no recipe is known.

    Args:
        framework, model, device: names of the catalog.
        dtype: element type, or the recipe of a narrow one.
        release: year and month of the release, as `26.04`; empty where there are none.
    """
    settings: dict[str, Any] = {}
    for candidate in _recipes(framework):
        if not candidate.is_of(model, device, dtype, release):
            continue
        # The first recipe that fits wins; later ones fill in what it leaves open.
        for field in fields(candidate):
            value = getattr(candidate, field.name)
            if field.name not in _CHOSEN_BY and value is not None:
                settings.setdefault(field.name, value)
    return settings


def plain_fp8(framework: str) -> Fp8Recipe:
    """The 8-bit recipe that a framework's tables call FP8; empty if unknown."""
    return next((file["fp8"] for _, file in _files(framework) if "fp8" in file), "")


@cache
def _recipes(framework: str) -> tuple[Recipe, ...]:
    recipes = []
    for name, file in _files(framework):
        for number, entry in enumerate(file.get("recipe", []), 1):
            recipes.append(checked(Recipe, entry, f"{name}, recipe {number}"))
    return tuple(recipes)


def _files(framework: str) -> list[tuple[str, dict[str, Any]]]:
    """Files with recipes of a framework, by their names."""
    recipe_tables = package_tables("recipes").items()
    return [
        (name, file)
        for name, file in recipe_tables
        if framework in file.get("frameworks", [name.removesuffix(".toml")])
    ]


def _order(release: str) -> tuple[int, ...]:
    """Year and month of a release; empty without a release."""
    return tuple(int(part) for part in release.split(".")[:2] if part)


@dataclass(frozen=True, kw_only=True)
class ExchangeRates:
    """Rates at which tokens are exchanged over one class of links.

    Raises:
        PerfModelError: rates that are not one per number of parties, or that rise with these.
    """

    link: str
    """Link class to which the rates apply."""
    link_gb_per_s: float
    """Nominal rate of a link one way [1e9 bytes/s], which rates are relative to."""
    ranks_per_node: int = 0
    """Ranks of each node, for rates between nodes; 0 for rates inside a node."""
    parties: tuple[int, ...]
    """Ranks inside a node, or nodes."""
    dispatch_gb_per_s: tuple[float, ...]
    combine_gb_per_s: tuple[float, ...]
    """Rate of a combine [1e9 bytes/s]: inside a node, the bytes that a rank receives per second;
    between nodes, the bytes that it sends to nodes. Its own bytes count too."""

    def __post_init__(self) -> None:
        for rates in (self.dispatch_gb_per_s, self.combine_gb_per_s):
            # More parties share the same links, so that a rate that rises with them is a slip of
            # the pen.
            falls = all(after <= before for before, after in pairwise(rates))
            parties_rise = all(after > before for before, after in pairwise(self.parties))
            if len(rates) != len(self.parties) or not falls or not parties_rise:
                raise PerfModelError(
                    f"exchange rates over {self.link}: give one rate per number of parties, with rising "
                    "parties and rates that do not rise"
                )


@dataclass(frozen=True, kw_only=True)
class ExchangeLibrary:
    """Figures of a dispatcher's kernels."""

    source: str = ""
    multiprocessors: int = 0
    """Multiprocessors that the kernels occupy in training frameworks; 0 if unknown."""
    rate: tuple[ExchangeRates, ...] = ()
    """Published rates; empty if there are none."""


@cache
def exchange_library(dispatcher: str) -> ExchangeLibrary:
    """The exchange library of a dispatcher; a default without figures if it is unknown."""
    name = f"{dispatcher}.toml"
    return checked(ExchangeLibrary, package_tables("dispatchers").get(name, {}), name)
