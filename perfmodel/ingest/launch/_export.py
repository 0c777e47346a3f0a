"""Layouts as launch files; whatever reading the file back would not give is refused.

In a user's own file settings that say nothing of layouts, and those that already say what they should, stay.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel import catalog
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._arguments import write_arguments
from perfmodel.ingest.launch._entries import wrapper_of, write_json, write_toml, write_yaml
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._launch import Launch
from perfmodel.ingest.launch._model import catalog_model, model_fields, model_of, shape
from perfmodel.ingest.launch._read import launch_format, parse_launch, recognised, text_of
from perfmodel.ingest.launch._table import BadValue, Fields, Rule
from perfmodel.spec import Job, Layout, Model, partition_by_cost, written

_WRITERS: Final = {"arguments": write_arguments, "json": write_json, "toml": write_toml, "yaml": write_yaml}
_ENDINGS: Final = {"arguments": ".sh", "json": ".json", "toml": ".toml", "yaml": ".yaml"}


def comparable(layout: Layout) -> Layout:
    """A layout as what runs, for comparisons: settings that have nothing to act on have their defaults."""
    same = layout.canonical
    if same.schedule == "gpipe" and layout.vpp > 1:
        same = same.replace(schedule="breadth-first")  # the same order
    if layout.tp == 1:
        same = same.replace(tp_overlap=False)
    if not layout.replicated and layout.offload_states == "none":
        same = same.replace(zero=0, overlap_grad_reduce=True)
    if same.zero == 0:
        # without shards there is nothing to gather
        same = same.replace(overlap_param_gather=True)
    ranks, usual = (
        [name for name in order.split("-") if getattr(layout, name) > 1] for order in (layout.order, Layout().order)
    )
    if ranks == usual:
        same = same.replace(order=Layout().order)
    if (full := same.recompute_full_layers) is not None:
        alike = (full[0],) if len(set(full)) == 1 else full
        same = same.replace(recompute_full_layers=None if alike == (0,) else alike)
    if layout.pp == 1:
        same = same.replace(partition=None)
    return same


def export_launch(
    layout: Layout,
    framework: str,
    *,
    model: Model | str | None = None,
    job: Job | None = None,
    devices_per_node: int = catalog.DEVICES_PER_NODE,
    like: Path | str | None = None,
) -> str:
    """The launch file of a framework that runs a layout, with model and job where the format holds them.

    Reading it back with `read_launch` gives the same layout; a layout of which that is not so is refused.

    Args:
        framework: such as `megatron-core`, `torchtitan@2025`, `nanotron`.
        model: what is trained; without it the file has no model.
        job: batch, sequence length and dtype.
        devices_per_node: of the cluster, for launchers that ask for it.
        like: a TOML, YAML or JSON file of this framework, whose other settings are kept (its comments are not).

    Raises:
        UnknownNameError: no launch files of this framework are known.
        LaunchFileError: what of the layout the framework cannot do, and why.
    """
    form = launch_format(framework)
    model = catalog.model(model) if isinstance(model, str) else model
    layout = _without_own_cut(form, layout, model)
    fields = _fields_for(form, framework, layout, model, job, devices_per_node)
    comments = [f"written by perfmodel: {_with_own_cut(form, layout, model).label}"]
    if kept := {name: getattr(layout, name) for name in form.elsewhere}:
        comments.append("perfmodel: " + ",".join(f"{name}={value}" for name, value in kept.items()))
    place = f"{Path(like).parent if like else '.'}/export{_ENDINGS[form.syntax]}"
    try:
        if like is not None and form.syntax != "arguments":
            try:
                return _written(form, merged(form, fields, like, stays=True), comments, place, layout, model, job)
            except LaunchFileError:
                # what stayed says something else beside the new values
                values, plain = (merged(form, one, like, stays=False) for one in (fields, without_model(fields)))
        else:
            values, plain = form.write(fields), form.write(without_model(fields))
    except LaunchFileError as error:
        raise LaunchFileError(f"{form.name} cannot run {layout.label}: {error}") from None
    if model is not None and not _holds(form, values, place, layout, model):
        # a model that would be another one when read back is left to the user
        values = plain
        comments.append(f"model {model.name}: this file does not state it; set it yourself")
    return _written(form, values, comments, place, layout, model, job)


def launch_values(
    layout: Layout, framework: str, *, model: Model | str | None, job: Job | None, devices_per_node: int
) -> dict[str, Any]:
    """The settings of the file that `export_launch` writes, by name.

    Raises:
        UnknownNameError, LaunchFileError: as `export_launch`.
    """
    form = launch_format(framework)
    model = catalog.model(model) if isinstance(model, str) else model
    layout = _without_own_cut(form, layout, model)
    return dict(form.write(_fields_for(form, framework, layout, model, job, devices_per_node)))


def _fields_for(
    form: LaunchFormat, framework: str, layout: Layout, model: Model | None, job: Job | None, devices_per_node: int
) -> Fields:
    """The fields of a file, with the framework that it names where its format serves several."""
    plain_name = framework.partition("@")[0].strip().lower()
    named = plain_name if plain_name in form.frameworks else form.frameworks[0]
    return _fields(layout, model, job, devices_per_node) | {"framework": named}


def _written(
    form: LaunchFormat,
    values: Mapping[str, Any],
    comments: Sequence[str],
    place: str,
    layout: Layout,
    model: Model | None,
    job: Job | None,
) -> str:
    """The file's text, which gives the same layout and job when it is read back; raises `LaunchFileError` if not."""
    text = _WRITERS[form.syntax](values, tuple(comments))
    back = parse_launch(
        text, place, devices=layout.devices, model=model, global_batch=job.global_batch if job else None
    )
    if back.layout is not None:
        back = replace(back, layout=_without_own_cut(form, back.layout, model))
    _require_same(form, back, layout, job)
    return text


def _without_own_cut(form: LaunchFormat, layout: Layout, model: Model | None) -> Layout:
    """The layout without the stages that the framework cuts so by itself: no file says them."""
    if model is None or not catalog.framework(form.frameworks[0]).stages_by_cost:
        return layout
    if layout.partition == partition_by_cost(model, layout.pp):
        return layout.replace(partition=None)
    return layout


def _with_own_cut(form: LaunchFormat, layout: Layout, model: Model | None) -> Layout:
    """The layout with the stages that the framework will cut by itself, where the layout leaves them open."""
    if model is None or layout.partition is not None or not catalog.framework(form.frameworks[0]).stages_by_cost:
        return layout
    return layout.replace(partition=partition_by_cost(model, layout.pp))


def write_launch(path: Path | str, text: str) -> None:
    """Write an exported file; scripts may be run."""
    path = Path(path)
    path.write_text(text, "utf-8")
    if text.startswith("#!"):
        path.chmod(path.stat().st_mode | 0o111)


def _fields(layout: Layout, model: Model | None, job: Job | None, devices_per_node: int) -> Fields:
    same = comparable(layout)
    fields: Fields = {name: getattr(same, name) for name in vars(same)}
    fields |= {"devices": layout.devices, "devices_per_node": devices_per_node}
    if job is not None:
        names = (
            "global_batch",
            "seq_len",
            "dtype",
            "flash_attention",
            "grad_dtype",
            "optimizer",
            "cuda_graphs",
            "recompute_modules",
            "fp8_activation_inputs",
        )
        names = (*names, "expert_dispatcher", "expert_capacity_factor") if layout.ep > 1 else names
        fields |= {name: getattr(job, name) for name in names}
    if model is None:
        return fields
    # torchtitan and others name models instead of describing them; stages need to know layers in any case
    fields |= {"layers": getattr(model, "layers", 0), "named": model.name}
    return fields | model_fields(model)


def _holds(form: LaunchFormat, values: Mapping[str, Any], place: str, layout: Layout, model: Model) -> bool:
    """Whether the file says this very model."""
    try:
        back = parse_launch(_WRITERS[form.syntax](values, ()), place, devices=layout.devices)
    except PerfModelError:
        return False
    return back.model is not None and shape(back.model) == shape(model)


def _require_same(form: LaunchFormat, back: Launch, layout: Layout, job: Job | None) -> None:
    """Refuse what came back other than it was; names it, with the reason where one is known."""
    if back.layout is None:
        raise LaunchFileError(f"{form.name} cannot run {layout.label}: {'; '.join(back.missing)}")
    wanted, got = vars(comparable(layout)), vars(comparable(back.layout))
    if job is not None:
        stated = dict(back.job_fields) | {"seq_len": back.seq_len, "global_batch": back.global_batch}
        stated = {name: value for name, value in stated.items() if value is not None}
        wanted, got = wanted | {name: getattr(job, name) for name in stated}, got | stated
    lost = [name for name in got if wanted[name] != got[name]]
    if lost:
        reasons = "; ".join(
            f"{name}={written(wanted[name])}" + (f" ({form.limits[name]})" if name in form.limits else "")
            for name in lost
            if name != "dp" or len(lost) == 1  # what is left for dp follows from the others
        )
        fix = ",".join(f"{name}={written(got[name])}" for name in lost if name != "dp" and got[name] is not None)
        raise LaunchFileError(f"{form.name} cannot run {layout.label}: {reasons}" + (f"; take {fix}" if fix else ""))


def merged(form: LaunchFormat, fields: Fields, like: Path | str, *, stays: bool) -> dict[str, Any]:
    """Values of a file that says the fields, made from another of the same format.

    Args:
        stays: keys that already say the fields keep their values, and models their names.

    Raises:
        LaunchFileError: the file is of another format, or the format cannot say the fields.
    """
    source, other = recognised(text_of(Path(like)), str(like))
    if other is not form:
        raise LaunchFileError(f"{like}: a launch file of {other.name}, not of {form.name}; leave it out")
    places = {key.removeprefix(wrapper_of(key)): key for key in source.written}
    wrapper = next(filter(None, map(wrapper_of, source.written)), "")
    found = {key: entry.value for key, entry in source.entries.items()}
    fields = without_model(fields) if stays and _names_model(form, found, fields) else fields
    values = form.write(fields)
    if stays:
        owners = Counter(key for rule in form.table for key in rule.keys)
        for rule in form.table:
            own = {key for key in rule.keys if owners[key] == 1}
            stated = {key: value for key, value in found.items() if key in rule.keys}
            if own & set(stated) and _says(rule, stated, fields):
                values = {key: value for key, value in values.items() if key not in own}
                values |= {key: source.written[places[key]] for key in own & set(stated) & set(places)}
        agreed = (key for key in found if key in places and key not in values and _agrees(form, key, found, fields))
        values |= {key: source.written[places[key]] for key in agreed}
    # values in the place of the file's, without what else it says of layouts
    ours = {places.get(key, wrapper + key): value for key, value in values.items()}
    meant = {places.get(key, key) for rule in form.table for key in rule.keys}
    parents = {key[:at] for key in ours for at, char in enumerate(key) if char == "."}
    kept = {
        key: ours.get(key, value)
        for key, value in source.written.items()
        if key in ours or (key not in meant and key not in parents)
    }
    return kept | ours


def without_model(fields: Fields) -> Fields:
    """The fields that say nothing of the model."""
    return {
        key: value for key, value in fields.items() if not key.startswith(("model.", "experts.", "latent.", "mamba."))
    }


def _said(rule: Rule, stated: Mapping[str, Any]) -> Fields:
    found = rule.said(stated)
    try:
        return rule.read(found) if found else {}
    except BadValue:
        return {}


def _says(rule: Rule, stated: Mapping[str, Any], fields: Fields) -> bool:
    """Whether values already say what the fields are, of which they say any."""
    said = _said(rule, stated)
    if "model" in said:
        return _same_model(said["model"], fields)
    return bool(said) and all(fields.get(key) == value for key, value in said.items() if not key.startswith("note."))


_NOT_WRITTEN: Final = ("note.", "doubt.", "bucket_bytes")
"""Beginnings of fields that no format writes: a file's keys for them stay as they are."""


def _agrees(form: LaunchFormat, key: str, settings: Mapping[str, Any], fields: Fields) -> bool:
    """Whether a key that the format reads and does not write says nothing else than the fields do."""
    owners = [rule for rule in form.table if key in rule.keys]
    for rule in owners:
        said = _said(rule, {name: value for name, value in settings.items() if name in rule.keys})
        others = {name: value for name, value in said.items() if not name.startswith(_NOT_WRITTEN)}
        if any(fields.get(name) != value for name, value in others.items()):
            return False
    return bool(owners)


def _names_model(form: LaunchFormat, settings: Mapping[str, Any], fields: Fields) -> bool:
    """Whether the file names the model of the fields instead of describing it."""
    for rule in form.table:
        said = _said(rule, {key: value for key, value in settings.items() if key in rule.keys})
        if "model" in said and _same_model(said["model"], fields):
            return True
    return False


def _same_model(name: str, fields: Fields) -> bool:
    named = catalog_model(name)
    wanted = catalog_model(fields["named"]) if "named" in fields else None
    return named is not None and shape(named) == shape(wanted or model_of(fields, "", ""))
