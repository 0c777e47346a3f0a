"""Writes layouts as launch files; refuses a layout that would not be read back the same.

In a user's own file, settings that do not concern layouts stay, and so do those that are already
right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from perfmodel import catalog
from perfmodel.catalog import networks
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._launch import Launch
from perfmodel.ingest.launch._launch_text import WRITERS
from perfmodel.ingest.launch._merge import merged, without_model
from perfmodel.ingest.launch._model import model_fields, shape
from perfmodel.ingest.launch._read import parse_launch
from perfmodel.ingest.launch._recognise import launch_format
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Job, Layout, Model, partition_by_cost
from perfmodel.spec.notation import written

_ENDINGS: Final = {"arguments": ".sh", "json": ".json", "toml": ".toml", "yaml": ".yaml"}


def comparable(layout: Layout) -> Layout:
    """The layout with settings that have no effect reset to their defaults."""
    # Reading a file back cannot restore fields that the file need not state. Two layouts are the
    # same here if every rank does the same work in the same order.
    canonical = layout.canonical
    if canonical.schedule == "gpipe" and layout.vpp > 1:
        # GPipe's order with several chunks is that of breadth-first.
        canonical = canonical.replace(schedule="breadth-first")
    if layout.tp == 1:
        canonical = canonical.replace(tp_overlap=False)
    # One replica has no others to shard states with, or to reduce gradients with.
    if not layout.replicated and layout.offload_states == "none":
        canonical = canonical.replace(zero=0, overlap_grad_reduce=True)
    if canonical.zero == 0:
        # Without shards there is nothing to gather.
        canonical = canonical.replace(overlap_param_gather=True)
    # A dimension of degree 1 may stand anywhere in the order of ranks.
    usual_order = Layout().order
    if _order_of_degrees(layout, layout.order) == _order_of_degrees(layout, usual_order):
        canonical = canonical.replace(order=usual_order)
    # Equal numbers of layers on all stages are written as one number; 0 is the same as no setting.
    full_layers = canonical.recompute_full_layers
    if full_layers is not None:
        if len(set(full_layers)) == 1:
            full_layers = (full_layers[0],)
        canonical = canonical.replace(
            recompute_full_layers=None if full_layers == (0,) else full_layers
        )
    if layout.pp == 1:
        canonical = canonical.replace(partition=None)
    return canonical


def _order_of_degrees(layout: Layout, order: str) -> list[str]:
    """Dimensions with more than one rank, innermost first."""
    return [name for name in order.split("-") if getattr(layout, name) > 1]


@dataclass(frozen=True)
class LaunchFile:
    """A written launch file, and what it cannot carry."""

    text: str
    by_script: str
    """What of the layout the training script must set, in the notation of layouts; empty for
    nothing."""
    left_to_script: tuple[str, ...]
    """Facts that the file does not state, each with where to set it."""


def export_launch(
    layout: Layout,
    framework: str,
    *,
    model: Model | str | None = None,
    job: Job | None = None,
    devices_per_node: int = networks.DEVICES_PER_NODE,
    like: Path | str | None = None,
) -> str:
    """Write the launch file that runs a layout under a framework, with model and job where the
    format has keys for them.

    Reading it back with `read_launch` gives the same layout: a layout that would come back as
    another is refused.

    Args:
        framework: such as `megatron-core`, `torchtitan@2025`, `nanotron`.
        model: the trained model; without it the file has no model.
        job: batch, sequence length and dtype.
        devices_per_node: node size of the cluster, for launchers that ask for it.
        like: a TOML, YAML or JSON file of this framework, whose other settings are kept (its
            comments are not).

    Raises:
        UnknownNameError: no launch files of this framework are known.
        LaunchFileError: the framework cannot run the layout; the message says which setting, and
            why.
    """
    return _exported(layout, framework, model, job, devices_per_node, like, is_strict=True).text


def launch_file(
    layout: Layout,
    framework: str,
    *,
    model: Model | str | None = None,
    job: Job | None = None,
    devices_per_node: int = networks.DEVICES_PER_NODE,
    like: Path | str | None = None,
) -> LaunchFile:
    """Write a launch file as `export_launch` does, and say what it leaves to the training script.

    Parts of the layout that only the training script can set (`LaunchFormat.in_script`) are
    accepted and named instead of refused. With these given, reading the file back gives the same
    layout.

    Raises:
        UnknownNameError, LaunchFileError: as `export_launch`.
    """
    return _exported(layout, framework, model, job, devices_per_node, like, is_strict=False)


def _exported(
    layout: Layout,
    framework: str,
    model: Model | str | None,
    job: Job | None,
    devices_per_node: int,
    like: Path | str | None,
    *,
    is_strict: bool,
) -> LaunchFile:
    """The launch file of a layout; `is_strict`: whether it must state all of the layout."""
    form = launch_format(framework)
    model = catalog.model(model) if isinstance(model, str) else model
    layout = without_own_cut(form.frameworks[0], layout, model)
    # Degrees of 1 and modes that are off need no line in the training script.
    usual = Layout()
    by_script: Fields = {}
    for name in () if is_strict else form.in_script:
        if layout.value(name) != usual.value(name):
            by_script[name] = layout.value(name)
    fields = _fields_for(form, framework, layout, model, job, devices_per_node)
    fields["by_script"] = tuple(by_script)
    # The label says the stages as they will run, though the file leaves the cut to the framework.
    comments = [f"written by perfmodel: {_with_own_cut(form, layout, model).label}"]
    kept = {name: layout.value(name) for name in form.elsewhere} | by_script
    if kept:
        # Fields without a key in the format are written into a comment, which is read back.
        comments.append("perfmodel: " + _notation(kept))
    comments += [_by_script(form, name, value) for name, value in by_script.items()]
    # The text is read back under this name: files that it includes lie beside the user's own.
    place = f"{Path(like).parent if like else '.'}/export{_ENDINGS[form.syntax]}"
    writing = _Writing(form, place, layout, model, job, by_script)
    try:
        # A user's own file keeps as much as it can: first all settings that agree, then only those
        # of other things.
        if like is not None and form.syntax != "arguments":
            try:
                values = merged(form, fields, like, stays=True)
                return writing.file(values, comments)
            except LaunchFileError:
                # Settings that stayed contradict the new values: write all of these anew.
                values = merged(form, fields, like, stays=False)
                values_without_model = merged(form, without_model(fields), like, stays=False)
        else:
            values = form.write(fields)
            values_without_model = form.write(without_model(fields))
    except LaunchFileError as error:
        raise LaunchFileError(f"a {form.name} file cannot state {layout.label}: {error}") from None
    # Formats describe models with fewer sizes than `Transformer` has (torchtitan only names them).
    if model is not None and not _holds(form, values, place, layout, model):
        # A model that would be another one when read back is left to the user.
        values = values_without_model
        comments.append(
            f"model {model.name}: this format has no key for the model; choose it in the training script"
        )
    return writing.file(values, comments)


def _notation(fields: Mapping[str, object]) -> str:
    """Fields in the notation of layouts."""
    return ",".join(f"{name}={written(value)}" for name, value in fields.items())


def _by_script(form: LaunchFormat, name: str, value: object) -> str:
    """A sentence on a field of the layout that the training script sets."""
    return f"{name}={written(value)} is not in this file: {form.in_script[name]}"


def launch_values(
    layout: Layout,
    framework: str,
    *,
    model: Model | str | None,
    job: Job | None,
    devices_per_node: int,
) -> dict[str, Any]:
    """The settings of the file that `export_launch` writes, by name.

    Raises:
        UnknownNameError, LaunchFileError: as `export_launch`.
    """
    form = launch_format(framework)
    model = catalog.model(model) if isinstance(model, str) else model
    layout = without_own_cut(form.frameworks[0], layout, model)
    fields = _fields_for(form, framework, layout, model, job, devices_per_node)
    return dict(form.write(fields | {"by_script": ()}))


def _fields_for(
    form: LaunchFormat,
    framework: str,
    layout: Layout,
    model: Model | None,
    job: Job | None,
    devices_per_node: int,
) -> Fields:
    """The fields of a file, including the framework if its format serves several."""
    plain_name = framework.partition("@")[0].strip().lower()
    named = plain_name if plain_name in form.frameworks else form.frameworks[0]
    return _fields(layout, model, job, devices_per_node) | {"framework": named}


@dataclass(frozen=True)
class _Writing:
    """What a file is written for, and must give when it is read back."""

    form: LaunchFormat
    place: str
    layout: Layout
    model: Model | None
    job: Job | None
    by_script: Mapping[str, object]
    """Fields of the layout that the training script sets."""

    def file(self, values: Mapping[str, Any], comments: Sequence[str]) -> LaunchFile:
        """The file, which gives the same layout and job when it is read back; raises
        `LaunchFileError` if not."""
        text = WRITERS[self.form.syntax](values, tuple(comments))
        # The written file is read back: a user must launch exactly what was predicted, setting by
        # setting.
        back = parse_launch(
            text,
            self.place,
            devices=self.layout.devices,
            model=self.model,
            global_batch=self.job.global_batch if self.job else None,
            layout=self.notation,
        )
        if back.layout is not None:
            cut = without_own_cut(self.form.frameworks[0], back.layout, self.model)
            back = replace(back, layout=cut)
        _require_same(self.form, back, self.layout, self.job)
        return LaunchFile(text, self.notation, self._left_out(text))

    @property
    def notation(self) -> str:
        """What the training script sets, as a layout; experts are checked against replicas."""
        return _notation({**self.by_script, "dp": self.layout.dp}) if self.by_script else ""

    def _left_out(self, text: str) -> tuple[str, ...]:
        """Facts of the prediction that the file does not state, each with where to set it."""
        sentences = [_by_script(self.form, name, value) for name, value in self.by_script.items()]
        alone = parse_launch(
            text,
            self.place,
            devices=self.layout.devices,
            model=self.model,
            layout=self.notation,
            needs_layout=False,
        )
        unstated: list[str] = []
        if self.model is not None and not self._states_model(text):
            unstated.append(f"model={self.model.name}")
        if self.job is not None:
            if alone.seq_len is None:
                unstated.append(f"seq_len={self.job.seq_len}")
            # Some files have no accumulation, and read alone have one batch of each device.
            if alone.global_batch != self.job.global_batch:
                unstated.append(f"global_batch={self.job.global_batch}")
            if "dtype" not in alone.job_fields:
                unstated.append(f"dtype={self.job.dtype}")
        if unstated:
            are = "is" if len(unstated) == 1 else "are"
            sentences.append(
                f"{', '.join(unstated)} {are} not in this file: set in the training script"
            )
        return tuple(sentences)

    def _states_model(self, text: str) -> bool:
        """Whether the file says which model is trained."""
        try:
            return parse_launch(text, self.place, devices=self.layout.devices).model is not None
        except PerfModelError:
            return False


def without_own_cut(framework: str, layout: Layout, model: Model | None) -> Layout:
    """The layout without the stages that the framework chooses by itself, which files do not
    state."""
    if model is None or not catalog.framework(framework).launch.stages_by_cost:
        return layout
    if layout.partition == partition_by_cost(model, layout.pp):
        return layout.replace(partition=None)
    return layout


def _with_own_cut(form: LaunchFormat, layout: Layout, model: Model | None) -> Layout:
    """The layout with the stages that the framework chooses by itself, if the layout leaves them
    open."""
    if (
        model is None
        or layout.partition is not None
        or not catalog.framework(form.frameworks[0]).launch.stages_by_cost
    ):
        return layout
    return layout.replace(partition=partition_by_cost(model, layout.pp))


def write_launch(path: Path | str, text: str) -> None:
    """Write an exported file; scripts are made executable."""
    path = Path(path)
    path.write_text(text, "utf-8")
    if text.startswith("#!"):
        path.chmod(path.stat().st_mode | 0o111)


def _fields(layout: Layout, model: Model | None, job: Job | None, devices_per_node: int) -> Fields:
    """The fields to write: those of the layout, and of job and model if given."""
    canonical = comparable(layout)
    fields: Fields = canonical.values()
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
        # Without experts on other ranks nothing is dispatched, and a file need not say how.
        if layout.ep > 1:
            names += ("expert_dispatcher", "expert_capacity_factor")
        fields |= {name: job.value(name) for name in names}
    if model is None:
        return fields
    # Torchtitan and others name models instead of describing them; stages need to know layers in
    # any case.
    fields |= {"layers": getattr(model, "layers", 0), "named": model.name}
    return fields | model_fields(model)


def _holds(
    form: LaunchFormat, values: Mapping[str, Any], place: str, layout: Layout, model: Model
) -> bool:
    """Whether the file describes exactly this model."""
    try:
        back = parse_launch(WRITERS[form.syntax](values, ()), place, devices=layout.devices)
    except PerfModelError:
        return False
    return back.model is not None and shape(back.model) == shape(model)


def _require_same(form: LaunchFormat, back: Launch, layout: Layout, job: Job | None) -> None:
    """Raise an error that names the fields that are not read back unchanged, with the reason if it
    is known."""
    if back.layout is None:
        raise LaunchFileError(
            f"a {form.name} file cannot state {layout.label}: {'; '.join(back.missing)}"
        )
    # Fields that the file does not state follow from the framework on both sides and need no
    # comparison.
    expected = comparable(layout).values()
    got = comparable(back.layout).values()
    if job is not None:
        stated = dict(back.job_fields) | {
            "seq_len": back.seq_len,
            "global_batch": back.global_batch,
        }
        stated = {name: value for name, value in stated.items() if value is not None}
        expected = expected | {name: job.value(name) for name in stated}
        got = got | stated
    lost = [name for name in got if expected[name] != got[name]]
    if lost:
        # Name each lost field with the reason and the value that the framework would use instead.
        reasons = "; ".join(
            f"{name}={written(expected[name])}"
            + (f" ({form.limits[name]})" if name in form.limits else "")
            for name in lost
            if name != "dp" or len(lost) == 1  # what is left for dp follows from the others
        )
        fix = ",".join(
            f"{name}={written(got[name])}"
            for name in lost
            if name != "dp" and got[name] is not None
        )
        raise LaunchFileError(
            f"a {form.name} file cannot state {layout.label}: {reasons}"
            + (f"; use {fix}" if fix else "")
        )
