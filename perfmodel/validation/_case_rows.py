"""A published row -> model, cluster, job and layout, or the reason why it cannot be."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.prediction import check_machine
from perfmodel.schedule import schedule_names
from perfmodel.spec import Cluster, Device, Framework, Job, Layout, Model, Transformer, schedule_name
from perfmodel.validation._row_cells import FROM_OTHERS, Row, Spread, Unusable, count, number, spread_of, text
from perfmodel.validation._row_choices import plausible_rows
from perfmodel.validation._row_model import model_of
from perfmodel.validation._row_words import (
    adapter_rank_of,
    attends_in_8_bits,
    dispatcher_of,
    dtype_of,
    fp8_recipe_of,
    framework_name,
    graphs_of,
    keeps_16_bits_alone,
    launch_flags,
    network_of,
    overlaps_experts,
    overlaps_tensor_parallel,
    recompute_modules_of,
    recompute_of,
    repeated_share,
    seq_len_of,
    sharding_of,
)


@dataclass(frozen=True)
class Case:
    """One published run, ready to predict."""

    case_id: str
    model: Model
    cluster: Cluster
    job: Job
    layout: Layout
    framework: Framework
    assumed: tuple[str, ...] = ()
    """Names of what nothing in the row tells, and was assumed."""
    recompute_stated: bool = True
    """Whether the row says what is recomputed."""

    @property
    def in_8_bits(self) -> "Case":
        """The case with inputs of activations kept in 8 bits, if products are in 8 bits, the framework can and the row
        tells recompute, by which it would save more otherwise; else as it is."""
        if self.recompute_stated and self.job.dtype == "fp8" and self.framework.keeps_fp8_activation_inputs:
            return replace(self, job=replace(self.job, fp8_activation_inputs=True))
        return self

    def recomputing_more(self) -> list["Case"]:
        """The case with more recompute than it has, as its framework can: `selective`, some layers of every stage, all
        of them. Compiled steps recompute by one policy for all layers."""
        layout, runs = self.layout, self.framework
        modes = ("none", "selective", "full")
        more = [mode for mode in modes[modes.index(layout.recompute) + 1 :] if mode in runs.recomputes]
        found = [layout.replace(recompute=mode, recompute_full_layers=None) for mode in more]
        if "full" in more and runs.execution != "compiled" and isinstance(self.model, Transformer):
            per_stage = -(-self.model.layers // layout.pp)
            some = sorted({round(per_stage * share) for share in SHARES_OF_LAYERS} - {0, per_stage})
            found += [layout.replace(recompute_full_layers=(n,)) for n in some]
        return [replace(self, layout=one, assumed=(*self.assumed, "recompute")) for one in found]


SHARES_OF_LAYERS: Final = (0.25, 0.5, 0.75)
"""Shares of a stage's layers that a run that told nothing of recompute may have repeated in full."""
_SCHEDULES = {
    "none": "1f1b", "": "1f1b", "interleaved-1f1b": "interleaved", "1f1b-i": "interleaved",
    # the authors search an order within a memory limit; these are their hand-made ones of the same memory
    "zb-1p": "zb-h1", "zb-2p": "zb-h2",
    "zb-2p-sync-optimizer": "zb-h2",  # all programs here wait for all gradients before an update
}  # fmt: skip


_IN_RECIPE: Final = "in the recipe"
_OF_RECIPE: Final = (
    "used by that recipe", "default config of that release", "framework NGC ", "train/tr11-176B-ml",
)  # fmt: skip
_UNKNOWN: Final = "launch blocking state not stated"
_IN_SCRIPTS: Final = "in the launch scripts of the tag"
_LAYOUT: Final = ("ep_overlap", "tp_overlap", "overlap_grad_reduce", "overlap_param_gather")
_JOB: Final = (
    "blocking_launches", "cuda_graphs", "expert_dispatcher", "flash_attention", "fp8_attention", "fused_experts",
    "wide_modules", "wide_last_layers",
)  # fmt: skip


@dataclass(frozen=True)
class RowRecipe:
    """Fields of a layout and of a job that a row leaves to its recipe."""

    layout: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)


def recipe_of(row: Row, framework: Framework, model: Model, device: Device, dtype: str) -> RowRecipe:
    """The recipe of a row, as the catalog has it; nothing where the row does not refer to one. Cells of the row go
    before it."""
    if (release := _recipe_release(row)) is None:
        return RowRecipe()
    plain = catalog.plain_fp8(framework.name) if dtype == "fp8" else ""
    narrow = fp8_recipe_of(row) or plain or framework.job_defaults(dtype)["fp8_recipe"]
    set_by = catalog.recipe(framework.name, _usual_name(model), device.name, narrow or dtype, release)
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
        if "offload_layers" in set_by and count(row, "pp", 1) == 1:  # recompute would be refused beside it
            layout |= {"recompute": "none", "offload_layers": set_by["offload_layers"]}
    return RowRecipe(layout, job)


def _recipe_release(row: Row) -> str | None:
    """The release of the recipe that a row refers to: of the framework, by the notes (`release 26.04`), or of the
    launch scripts, by the tag of the page. Empty where recipes have none (a launcher has its configurations beside
    it, a container of NGC its examples, BigScience its launch scripts), None where the row refers to none."""
    notes = text(row, "notes")
    found = re.search(r"release (\d+\.\d+)", notes)
    if found and _IN_RECIPE in notes and "pre-training" in notes:
        return found[1]
    found = re.search(r"\(tag v(\d+\.\d+)", text(row, "url_or_repo"))
    if found and _IN_SCRIPTS in notes:
        return found[1]
    said = f"{notes} {text(row, 'url_or_repo')}"
    return "" if any(words in said for words in _OF_RECIPE) and _UNKNOWN not in notes else None


def _usual_name(model: Model) -> str:
    """The catalog's name of a model, or the model's, where the catalog has none."""
    try:
        return catalog.model(model.name).name
    except PerfModelError:
        return model.name


def _with_shards_of_recipe(row: Row, framework: Framework) -> Row:
    """With the devices over which FSDP shards weights, where the row's recipe tells them and the row does not."""
    release = _recipe_release(row)
    if not release or text(row, "sharding").lower() != "fsdp":
        return row
    model, device = _usual_name(model_of(row, framework).model), catalog.device(text(row, "device")).name
    shards = catalog.recipe(framework.name, model, device, "", release).get("shards")
    return {**row, "sharding": f"FSDP over {shards} devices"} if shards else row


def read_case(row: Row, framework: Framework | None = None) -> Case:
    """Build the case of one row: what it states, completed by the framework of its column of that name.

    Args:
        framework: instead of the row's.

    Raises:
        Unusable: naming the cell that is missing or the feature that is not modelled.
        PerfModelError: where catalog or specs refuse what the row states.
    """
    runs, assumed_framework = framework_of(framework_name(row)) if not framework else (framework, False)
    found = model_of(row, runs)
    model = found.model
    seq_len, assumed_length = seq_len_of(row, model)
    spread = spread_of(row, seq_len, runs.micro_batch)
    cluster = catalog.cluster_for(
        text(row, "device"), count(row, "devices_per_node", 8), text(row, "intra_link"), network_of(row)
    )
    dtype, assumed_dtype = dtype_of(row)
    preset = recipe_of(row, runs, model, cluster.device, dtype)
    layout, _ = runs.layout(stated_layout(row, spread, model, runs, preset), model)
    if layout.devices != count(row, "n_devices", layout.devices):
        raise Unusable("degrees do not multiply to the devices")
    flash = number(row, "flash_attention")
    said: dict[str, Any] = {"cuda_graphs": graphs_of(launch_flags(row))} | preset.job
    if flash is not None:
        said["flash_attention"] = bool(flash)
        said["fp8_attention"] = bool(flash) and said.get("fp8_attention", False)
    if modules := recompute_modules_of(row):
        said["recompute_modules"] = modules
    if (recipe := fp8_recipe_of(row)) is not None:
        said["fp8_recipe"] = recipe
    if dtype == "fp8" and flash != 0 and attends_in_8_bits(row):
        said["fp8_attention"] = True
    if keeps_16_bits_alone(row):
        said["optimizer"] = "adam16bit"
    if dispatcher := dispatcher_of(row):
        said["expert_dispatcher"] = dispatcher
    if (rank := adapter_rank_of(row)) is not None:
        exchanges = launch_flags(row).get("lora_a2a", False)
        said |= {"frozen": True, "adapter_rank": rank, "adapter_all_to_all": exchanges and rank > 0}
    job = runs.job(model, cluster.device, global_batch=spread.global_batch, seq_len=seq_len, dtype=dtype, **said)
    check_machine(cluster, job, layout.devices, "the run")
    guessed = {"framework": assumed_framework, "seq_len": assumed_length, "dtype": assumed_dtype}
    assumed = (
        *found.assumed,
        *text(row, FROM_OTHERS).split(),
        *spread.assumed,
        *(name for name, is_so in guessed.items() if is_so),
    )
    stated = bool(recompute_of(row)) or "recompute" in preset.layout or layout.recompute_full_layers is not None
    return Case(text(row, "case_id"), model, cluster, job, layout, runs, assumed, stated)


def read_cases(row: Row, framework: Framework | None = None) -> list[Case]:
    """The case of a row, or one for every plausible value of what it leaves open (`plausible_rows`), those that are
    possible at all.

    Raises:
        Unusable, PerfModelError: as `read_case`, where none is possible.
    """
    runs = framework or framework_of(framework_name(row))[0]
    usual = runs.micro_batch if runs.micro_batch != Framework.micro_batch else None
    row = _with_shards_of_recipe(row, runs)
    rows, names = plausible_rows(row, usual, _narrow_dtype(row, runs), runs.layer_graphs)
    cases, refused = [], []
    for one in rows:
        try:
            cases.append(read_case(one, framework))
        except PerfModelError as error:
            refused.append(error)
    if not cases:
        raise refused[0]
    if names:  # what a framework cannot run is no choice
        cases = [case for case in cases if not runs.cannot_run(case.layout)] or cases
    return [replace(case, assumed=tuple(dict.fromkeys((*case.assumed, *names)))) for case in cases]


def _narrow_dtype(row: Row, framework: Framework) -> str | None:
    """The type of 8 bits that a framework has a recipe for and a row's device products in; None for none."""
    try:
        dtypes = catalog.device(text(row, "device")).dtypes
    except PerfModelError:
        return None
    found = (dtype for dtype in ("fp8", "int8") if dtype in dtypes and framework.job_defaults(dtype)["fp8_recipe"])
    return next(found, None)


def framework_of(name: str) -> tuple[Framework, bool]:
    """The framework that a cell names, `generic` for an empty one, and whether it is assumed: the first version for a
    year before that, `generic` for a name that the catalog does not have."""
    try:
        return catalog.framework(name or "generic"), False
    except PerfModelError:
        plain = name.partition("@")[0]
        if plain in catalog.frameworks():
            return catalog.framework_versions(plain)[0], True
        return catalog.framework("generic"), True


def stated_layout(row: Row, spread: Spread, model: Model, framework: Framework, recipe: RowRecipe) -> str:
    """The layout that a row states, and its recipe, in a layout's notation; what they leave out is its framework's.

    Raises:
        Unusable: a schedule that is not modelled.
    """
    name = text(row, "schedule").lower()
    schedule = _SCHEDULES.get(name, schedule_name(name))
    if schedule.partition(":")[0] not in schedule_names():
        raise Unusable(f"schedule {name} is not modelled")
    said: dict[str, Any] = {n: getattr(spread, n) for n in ("tp", "pp", "dp", "cp", "micro_batch")} | recipe.layout
    said["ep"] = count(row, "ep", 1)
    if getattr(model, "experts", None) and (etp := _expert_tp(row, spread, said["ep"])) != spread.tp:
        said["etp"] = etp
    if spread.pp > 1 and (vpp := count(row, "vpp", 1)) > 1:
        said |= {"vpp": vpp, "schedule": "interleaved"}
    elif name:
        said["schedule"] = schedule.replace("interleaved", "1f1b")
    said |= sharding_of(row, spread.dp, spread.pp)
    if (sequence := number(row, "sequence_parallel")) is not None:
        said["sequence_parallel"] = bool(sequence)
    if recompute := recompute_of(row):
        said["recompute"] = recompute
    if (hidden := overlaps_tensor_parallel(launch_flags(row))) is not None:
        said["tp_overlap"] = hidden and spread.tp > 1
    if (beside := overlaps_experts(row)) is not None:
        said["ep_overlap"] = beside
    if (share := repeated_share(row, model)) and spread.pp == 1 and isinstance(model, Transformer):
        said |= {"recompute": "none", "recompute_full_layers": round(share * model.layers)}
    if (layers := _selected_layers(row, spread, model)) and framework.selective_layers:
        said |= {"recompute": "none", "recompute_full_layers": layers}
    return ",".join(f"{key}={str(value).lower()}" for key, value in said.items())


def _expert_tp(row: Row, spread: Spread, ep: int) -> int:
    """Tensor-parallel degree inside experts: of its column; else tp, or the largest part of it with which `ep` groups
    of experts find their ranks in a stage."""
    ranks = spread.tp * spread.cp * spread.dp
    fitting = [n for n in range(1, spread.tp + 1) if spread.tp % n == 0 and ranks % (ep * n) == 0]
    return count(row, "etp", max(fitting, default=spread.tp))


def _selected_layers(row: Row, spread: Spread, model: Model) -> int:
    """Layers that are recomputed as a whole where `selective` means some of them: a share f of them makes HFU / MFU
    = 1 + f / 3, a forward being a third. 0 where the row does not tell."""
    hardware, useful = number(row, "measured_hfu"), number(row, "measured_mfu")
    if not text(row, "recompute").startswith("selective") or spread.pp > 1 or hardware is None or not useful:
        return 0
    layers = model.layers if isinstance(model, Transformer) else 0
    return round(min(1.0, max(0.0, 3 * (hardware / useful - 1))) * layers)
