"""Settings of a row of published runs that come from the recipe of its framework or release."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel import catalog
from perfmodel.spec import Device, Framework, Model, Transformer
from perfmodel.validation.rows._cells import Row, count, text
from perfmodel.validation.rows._layout_words import recompute_of
from perfmodel.validation.rows._model import known_model, model_of
from perfmodel.validation.rows._words import fp8_recipe_of

NO_RELEASE: Final = "default"
"""Release of recipes that have no releases: configurations that a launcher ships, examples of a
container."""
_LAYOUT: Final = ("ep_overlap", "tp_overlap", "overlap_grad_reduce", "overlap_param_gather")
_JOB: Final = (
    "blocking_launches",
    "cuda_graphs",
    "expert_dispatcher",
    "flash_attention",
    "fp8_attention",
    "fused_experts",
    "wide_modules",
    "wide_last_layers",
)


@dataclass(frozen=True)
class RowRecipe:
    """Fields of layout and job that come from a recipe."""

    layout: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)


def recipe_of(
    row: Row, framework: Framework, model: Model, device: Device, dtype: str
) -> RowRecipe:
    """The catalog's recipe for a row, or an empty one. Cells of the row override it."""
    release = _recipe_release(row)
    if release is None:
        return RowRecipe()
    plain = catalog.plain_fp8(framework.name) if dtype == "fp8" else ""

    # The recipe is looked up under the 8-bit recipe that the row, the framework's plain `fp8`, or
    # its default stands for, in this order.
    narrow = fp8_recipe_of(row, framework) or plain or framework.job_defaults(dtype)["fp8_recipe"]
    set_by = catalog.recipe(
        framework.name, _usual_name(model), device.name, narrow or dtype, release
    )
    layout = {name: set_by[name] for name in _LAYOUT if name in set_by}
    job: dict[str, Any] = {name: set_by[name] for name in _JOB if name in set_by}
    if plain and not fp8_recipe_of(row, framework):
        job["fp8_recipe"] = plain

    if isinstance(model, Transformer):
        layout |= _partition(row, model, set_by.get("fewer_on_last_stage", 0))

    # The row's own statement on recompute overrides the recipe, which applies only if the row does
    # not mention it.
    if not recompute_of(row):
        if set_by.get("recompute_modules"):
            job["recompute_modules"] = set_by["recompute_modules"]
        layout |= _recompute(row, model, set_by)
    return RowRecipe(layout, job)


def _partition(row: Row, model: Transformer, fewer: int) -> dict[str, str]:
    """Layers of every stage if the last has fewer because it also computes the head; the others
    must divide evenly."""
    stages = count(row, "pp", 1) * count(row, "vpp", 1)
    if not fewer or stages == 1:
        return {}
    layers_per_chunk, remainder = divmod(model.layers + fewer, stages)
    if remainder or layers_per_chunk < fewer:
        return {}
    partition = [layers_per_chunk] * (stages - 1) + [layers_per_chunk - fewer]
    return {"partition": "-".join(map(str, partition))}


def _recompute(row: Row, model: Model, set_by: Mapping[str, Any]) -> dict[str, Any]:
    """Layout fields of recompute and offload that a recipe sets, the strongest last."""
    layout: dict[str, Any] = {}
    modules = set_by.get("recompute_modules")
    if modules is not None:
        layout["recompute"] = "selective" if modules else "none"
    layers = set_by.get("recompute_layers")
    if isinstance(model, Transformer) and layers:
        layout |= {"recompute": "none", "recompute_full_layers": layers}
    # Recompute would be refused beside offloaded layers.
    if "offload_layers" in set_by and count(row, "pp", 1) == 1:
        layout |= {"recompute": "none", "offload_layers": set_by["offload_layers"]}
    return layout


def _recipe_release(row: Row) -> str | None:
    """The release of the recipe whose settings a row refers to, by its column `recipe_release`
    (`v25.04`); empty if recipes have none (`default`), None if the row refers to none."""
    release = text(row, "recipe_release")
    if not release:
        return None
    return "" if release == NO_RELEASE else release.removeprefix("v")


def _usual_name(model: Model) -> str:
    """The catalog's name of a model, or the model's own name if it is not in the catalog."""
    return (known_model(model.name) or model).name


def with_shards_of_recipe(row: Row, framework: Framework) -> Row:
    """Fill in the number of devices over which FSDP shards weights, from the row's recipe."""
    release = _recipe_release(row)
    if not release or text(row, "sharding").lower() not in ("fsdp", "fsdp+dp"):
        return row
    model = _usual_name(model_of(row, framework).model)
    device = catalog.device(text(row, "device")).name
    shards = catalog.recipe(framework.name, model, device, "", release).get("shards")
    return {**row, "sharding": f"FSDP over {shards} devices"} if shards else row
