"""Reads the layout and job that a row states, as launch arguments or in columns."""

from collections.abc import Mapping
from typing import Any

from perfmodel.spec import Framework, Layout, Model, Transformer
from perfmodel.spec.notation import written
from perfmodel.units import divisors
from perfmodel.validation.rows._cells import Row, Spread, count, number, text
from perfmodel.validation.rows._keys import layout_values
from perfmodel.validation.rows._layout_words import (
    recompute_modules_of,
    recompute_of,
    repeated_layers,
    schedule_of,
    secondary_shards_of,
    sharding_of,
)
from perfmodel.validation.rows._recipe import RowRecipe
from perfmodel.validation.rows._words import (
    adapter_rank_of,
    attends_in_8_bits,
    base_weights_of,
    fp8_recipe_of,
    gradient_dtype_of,
    graphs_of,
    keeps_16_bits_alone,
    launch_switches,
    layout_switches,
)


def stated_layout(
    row: Row, spread: Spread, model: Model, framework: Framework, recipe: RowRecipe
) -> str:
    """The layout stated by a row and its recipe, with the framework's defaults for the rest."""
    schedule = _stated_schedule(row, spread)

    # Degrees and batch of the row over what its recipe sets; everything else is added only where
    # the row says it.
    degrees = {name: getattr(spread, name) for name in ("tp", "pp", "dp", "cp", "micro_batch")}
    fields: dict[str, Any] = degrees | recipe.layout
    fields["ep"] = count(row, "ep", 1)
    if getattr(model, "experts", None):
        etp = _expert_tp(row, spread, fields["ep"])
        if etp != spread.tp:
            fields["etp"] = etp
    fields |= schedule
    fields |= sharding_of(row, spread.dp, spread.pp)
    sequence_parallel = number(row, "sequence_parallel")
    if sequence_parallel is not None:
        fields["sequence_parallel"] = bool(sequence_parallel)
    recompute = recompute_of(row)
    if recompute:
        fields["recompute"] = recompute

    # Without tensor parallelism there are no collectives that could be overlapped, whatever the
    # launch says.
    switches = launch_switches(row)
    if "tp_overlap" in switches:
        fields["tp_overlap"] = switches["tp_overlap"] and spread.tp > 1
    fields |= layout_switches(row)

    # Whole layers to recompute are a number of their own, beside which the mode is `none`.
    full_layers = _recomputed_layers(row, spread, model, framework)
    if full_layers is not None:
        fields |= {"recompute": "none", "recompute_full_layers": full_layers}
    return ",".join(f"{key}={str(value).lower()}" for key, value in fields.items())


def _stated_schedule(row: Row, spread: Spread) -> dict[str, Any]:
    """The schedule and chunks per stage of a row, if stated."""
    # Several model chunks per stage only run interleaved, whatever the row calls the schedule.
    vpp = count(row, "vpp", 1) if spread.pp > 1 else 1
    if vpp > 1:
        return {"vpp": vpp, "schedule": "interleaved"}
    schedule = schedule_of(row).name
    return {"schedule": schedule.replace("interleaved", "1f1b")} if schedule else {}


def _recomputed_layers(row: Row, spread: Spread, model: Model, framework: Framework) -> int | None:
    """Number of layers that are recomputed in full, if the row states or implies it; else None."""
    # `selective` means parts of every layer in some frameworks and some whole layers in others,
    # where the utilisation tells how many.
    if framework.launch.selective_layers:
        selected = _selected_layers(row, spread, model)
        if selected:
            return selected
    return repeated_layers(row, model, spread.pp * max(1, count(row, "vpp", 1)))


def _expert_tp(row: Row, spread: Spread, ep: int) -> int:
    """Tensor-parallel degree inside experts: from its column; else tp, or its largest divisor for
    which `ep` groups of experts fit the ranks of a stage."""
    # Experts take ep * etp of a stage's tp * cp * dp ranks. The largest part of tp that comes out
    # even is what launchers derive.
    ranks = spread.tp * spread.cp * spread.dp
    fitting = [n for n in divisors(spread.tp) if ranks % (ep * n) == 0]
    return count(row, "etp", max(fitting, default=spread.tp))


def _selected_layers(row: Row, spread: Spread, model: Model) -> int:
    """Number of layers recomputed in full if `selective` means some of them. A share f gives HFU /
    MFU = 1 + f / 3, because a forward pass is a third of a step. 0 if the row does not state
    both."""
    hfu = number(row, "measured_hfu")
    mfu = number(row, "measured_mfu")
    if (
        not text(row, "recompute").startswith("selective")
        or spread.pp > 1
        or hfu is None
        or not mfu
    ):
        return 0
    layers = model.layers if isinstance(model, Transformer) else 0
    recomputed_share = 3 * (hfu / mfu - 1)
    return round(min(1.0, max(0.0, recomputed_share)) * layers)


def with_layout_keys(layout_text: str, keys: Mapping[str, Any], run_name: str) -> str:
    """A layout's notation overridden by the fields of `layout.*` columns."""
    stated = layout_values(keys, run_name)
    if not stated:
        return layout_text
    values = Layout.stated(layout_text) | stated
    # A mode and a number of layers exclude each other: the one that the columns state replaces the
    # other.
    if (
        "recompute_full_layers" in stated
        and "recompute" not in stated
        and values.get("recompute") == "full"
    ):
        values["recompute"] = "none"
    if stated.get("recompute") == "full" and "recompute_full_layers" not in stated:
        values.pop("recompute_full_layers", None)
    return ",".join(f"{name}={written(value)}" for name, value in values.items())


def stated_job(row: Row, framework: Framework, preset: RowRecipe, dtype: str) -> dict[str, Any]:
    """Fields of the job that a row's words and its recipe state."""
    switches = launch_switches(row)
    job_fields: dict[str, Any] = {"cuda_graphs": graphs_of(switches)} | preset.job

    # Attention in 8 bits is a kernel of fused attention: without the latter there is none.
    flash = number(row, "flash_attention")
    if flash is not None:
        job_fields["flash_attention"] = bool(flash)
        job_fields["fp8_attention"] = bool(flash) and job_fields.get("fp8_attention", False)
    modules = recompute_modules_of(row)
    if modules:
        job_fields["recompute_modules"] = modules
    recipe = fp8_recipe_of(row, framework)
    if recipe is not None:
        job_fields["fp8_recipe"] = recipe
    if dtype in ("fp8", "fp4") and flash != 0 and attends_in_8_bits(row):
        job_fields["fp8_attention"] = True
    # Gradients have the type of the weights that they are of, where nothing wider is kept (torch's
    # `Tensor.grad`).
    if keeps_16_bits_alone(row):
        job_fields |= {"optimizer": "adam16bit", "grad_dtype": dtype}
    if gradient_dtype_of(row):
        job_fields["grad_dtype"] = gradient_dtype_of(row)
    secondary_shards = secondary_shards_of(row)
    if secondary_shards:
        job_fields["secondary_shards"] = secondary_shards

    # Switches of a launch are statements only where they are on: a launch that does not name one
    # may still have it by its framework's default.
    for dispatcher in ("hybridep", "deepep"):
        if switches.get(dispatcher):
            job_fields["expert_dispatcher"] = dispatcher
    if switches.get("fused_experts"):
        job_fields["fused_experts"] = True
    if "operation_fuser" in switches:
        job_fields["operation_fuser"] = switches["operation_fuser"]
    if switches.get("blocking_launches"):
        job_fields["blocking_launches"] = True
    if switches.get("bf16 gradients"):
        job_fields["grad_dtype"] = "bf16"

    # A row with adapters (LoRA) trains only these. Whether they are exchanged by all-to-all is a
    # separate switch.
    rank = adapter_rank_of(row)
    if rank is not None:
        job_fields |= {"frozen": True, "adapter_rank": rank}
        job_fields["adapter_all_to_all"] = switches.get("lora_a2a", False) and rank > 0
        if base_weights_of(row):
            job_fields["base_weights"] = base_weights_of(row)
    return job_fields
