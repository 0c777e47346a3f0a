"""What the performance recipe of a row's release sets, where its table says that this is not in the table."""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel import catalog
from perfmodel.spec import Device, Framework, Model, Transformer
from perfmodel.validation._row_cells import Row, count, text
from perfmodel.validation._row_words import dispatcher_of, fp8_recipe_of, recompute_of

_IN_RECIPE: Final = "in the recipe"
_LAYOUT: Final = ("ep_overlap", "tp_overlap")
_JOB: Final = ("cuda_graphs", "expert_dispatcher")


@dataclass(frozen=True)
class RowRecipe:
    """Fields of a layout and of a job that a row leaves to its recipe."""

    layout: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)


def recipe_of(row: Row, framework: Framework, model: Model, device: Device, dtype: str) -> RowRecipe:
    """The recipe of a row by the framework's release that its notes name (`release 26.04`), as the catalog has it;
    nothing where the row does not refer to one. Cells of the row go before it."""
    notes = text(row, "notes")
    release = re.search(r"release (\d+\.\d+)", notes)
    if _IN_RECIPE not in notes or release is None or "pre-training" not in notes:
        return RowRecipe()
    plain = catalog.plain_fp8(framework.name) if dtype == "fp8" else ""
    narrow = fp8_recipe_of(row) or plain or framework.job_defaults(dtype)["fp8_recipe"]
    set_by = catalog.recipe(framework.name, model.name, device.name, narrow or dtype, release[1])
    layout = {name: set_by[name] for name in _LAYOUT if name in set_by}
    job: dict[str, Any] = {name: set_by[name] for name in _JOB if name in set_by}
    if plain and not fp8_recipe_of(row):
        job["fp8_recipe"] = plain
    if dispatcher_of(row):
        job.pop("expert_dispatcher", None)
    fewer, stages = set_by.get("fewer_on_last_stage", 0), count(row, "pp", 1) * count(row, "vpp", 1)
    if isinstance(model, Transformer) and fewer and stages > 1:
        each, rest = divmod(model.layers + fewer, stages)
        if rest == 0 and each >= fewer:
            layout["partition"] = "-".join(map(str, (*[each] * (stages - 1), each - fewer)))
    if not recompute_of(row):
        if modules := set_by.get("recompute_modules"):
            layout["recompute"], job["recompute_modules"] = "selective", modules
        elif modules is not None:
            layout["recompute"] = "none"
        if isinstance(model, Transformer) and (layers := set_by.get("recompute_layers")):
            layout |= {"recompute": "none", "recompute_full_layers": layers}
    return RowRecipe(layout, job)
