"""Problems from names and keywords, or from a job file: model, cluster, job, layout, framework and
search space in one TOML.

At the top of a job file are `model`, `cluster` and `framework`, each a name, the path of a file, or
a table as such a file holds it, and `devices`; below it the tables `[job]` (fields of `Job`),
`[layout]` (fields of `Layout`), `[network]` (a network that replaces the cluster's), `[search]`
(keywords of `perfmodel.search`) and `[serving]` (keywords of `perfmodel.serve`). A table `[model]`
with `like = NAME`, and a table `[framework]` with `name = NAME`, change that entry of the catalog.
Paths are relative to the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Unpack

from perfmodel.catalog._clusters import cluster as named_cluster
from perfmodel.catalog._clusters import cluster_from_toml, with_network
from perfmodel.catalog._frameworks import framework as named_framework
from perfmodel.catalog._models import model as named_model
from perfmodel.catalog._models import model_from_toml, model_with
from perfmodel.catalog.entries import checked_fields, read_toml
from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.files import parse_toml
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem, key_fields
from perfmodel.spec.keywords import JobKeywords
from perfmodel.spec.notation import written, written_values

_JOB_KEYS: Final = {key: entry for key, entry in key_fields(Job).items() if key != "assumed"}
JOB_WORDS: Final = tuple(sorted(_JOB_KEYS, key=lambda key: len(_JOB_KEYS[key].path)))
"""Keys of `[job]` and keywords of a job: its plain fields first, then those of its sections."""
FRAMEWORK_FACTS: Final = tuple(
    key for key in key_fields(Framework) if key not in ("name", "since", "sources")
)
"""Keys of a table [framework] other than `name`."""
NAMED: Final = ("model", "cluster", "framework")
SECTIONS: Final = ("job", "layout", "network", "search", "serving")
JOB_FILE_KEYS: Final = (*NAMED, "devices", *SECTIONS)
"""Keys at the top of a job file."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A parsed job file, with changes from the command line."""

    place: str
    """Path of the job file, or the name that errors give it."""
    problem_fields: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `catalog.problem`: model, cluster, framework, devices and fields of the job."""
    layout: str = ""
    """Layout in its notation; empty if the file has none."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """Search settings as written in the file."""
    serving: Mapping[str, Any] = field(default_factory=dict)
    """Serving settings as written in the file."""


def is_job_file(name: object) -> bool:
    """Whether a model's name is the path of a job file (a TOML with keys that only job files
    have)."""
    if not isinstance(name, (str, Path)) or Path(name).suffix != ".toml":
        return False
    return any(key in read_toml(Path(name)) for key in JOB_FILE_KEYS)


def read_job(path: Path | str | None, changes: Sequence[str] = ()) -> JobFile:
    """Read a job file and apply `KEY=VALUE` changes such as `job.seq_len=4096` or `layout.tp=4`.

    Args:
        path: path of the file; without one the job consists of the changes alone.
        changes: keys with dots; values as TOML has them, or plain text.

    Raises:
        PerfModelError: a file that cannot be read; an unknown key or a value that it cannot have,
            by name.
    """
    place = str(path) if path is not None else "--set"
    # Only a file on disk has a folder that its schedule may lie in; changes of the command line may
    # name any file.
    data = read_toml(Path(path)) if path is not None else {}
    if path is not None and "layout" in data:
        data["layout"] = _with_schedule_below(data["layout"], Path(path).parent, place)
    for change in changes:
        _change(data, change)
    folder = Path(path).parent if path is not None else Path()
    return job_from_toml(data, place, folder)


def job_from_toml(data: Mapping[str, Any], place: str, folder: Path | None = None) -> JobFile:
    """A job file from its parsed TOML, or from a row of a table whose columns are keys of job
    files.

    Args:
        place: name of the file in messages.
        folder: base of relative paths in it.

    Raises:
        PerfModelError: an unknown key or a value that it cannot have, by name.
    """
    _check_keys(data, place)
    # A row of a table comes from a stranger and has no folder: no schedule of it may name a file.
    if folder is None and "layout" in data:
        _with_schedule_below(data["layout"], None, place)
    stated = _named_records(data, place, folder or Path())
    if "devices" in data:
        if type(data["devices"]) is not int:
            raise PerfModelError(
                f"{place}: devices must be a whole number, got {data['devices']!r}"
            )
        stated["devices"] = data["devices"]
    # Tables of layout, search and serving are checked where they are read; here only their place in
    # the file is checked.
    stated |= checked_fields(Job, data.get("job", {}), f"{place} [job]", JOB_WORDS)
    return JobFile(
        place=place,
        problem_fields=stated,
        layout=_layout(data, place),
        search=data.get("search", {}),
        serving=data.get("serving", {}),
    )


def _check_keys(data: Mapping[str, Any], place: str) -> None:
    """Refuse unknown keys, and values of the wrong kind."""
    # Few keys stand at the top; for one that belongs in a table or a launch file, the error says
    # where it goes.
    for key, value in data.items():
        if key not in JOB_FILE_KEYS:
            if key in JOB_WORDS:
                remark = f"{key} belongs under [job]"
            else:
                remark = UnknownNameError("key", key, JOB_FILE_KEYS)
            raise PerfModelError(f"{place}: {remark} (give launch files with --from)")
        if key in ("job", "search", "serving", "network") and not isinstance(value, dict):
            raise PerfModelError(f"{place}: {key} must be a table, [{key}], got {value!r}")
        if key in NAMED and not isinstance(value, str | dict):
            raise PerfModelError(
                f"{place}: {key} must be a name or the path of a file, got {value!r}"
            )


def _named_records(data: Mapping[str, Any], place: str, folder: Path) -> dict[str, Any]:
    """Model, cluster and framework of a file: names and paths unchanged, tables as records."""
    # Resolve paths here, because the records do not remember the folder of their file.
    stated = {key: _path_beside(folder, data[key]) for key in NAMED if key in data}
    stem = Path(place).stem
    if isinstance(stated.get("model"), dict):
        stated["model"] = _model_table(stated["model"], f"{place} [model]", stem)
    if isinstance(stated.get("cluster"), dict):
        stated["cluster"] = cluster_from_toml(stated["cluster"], f"{place} [cluster]", stem)
    if isinstance(stated.get("framework"), dict):
        changes = dict(stated["framework"])
        base = named_framework(str(changes.pop("name", "generic")))
        stated["framework"] = framework_with(changes, base, f"{place} [framework]")
    # The network changes a cluster that is named; a cluster in full has a network of its own.
    if "network" in data:
        if "cluster" not in stated:
            raise PerfModelError(
                f"{place} [network]: this table changes the network of a cluster, but no cluster is named; name one"
            )
        stated["cluster"] = with_network(
            named_cluster(stated["cluster"]), data["network"], f"{place} [network]"
        )
    return stated


def _model_table(table: dict[str, Any], place: str, stem: str) -> Model:
    """The model of a table [model]: a complete one, or a catalog model (`like`) with some fields
    changed."""
    table = dict(table)
    base_name = table.pop("like", None)
    if base_name is None:
        return model_from_toml({"name": stem} | table, place)
    return model_with(named_model(str(base_name)), table, place)


def framework_with(changes: Mapping[str, Any], framework: Framework, place: str) -> Framework:
    """A framework with some facts changed, by field name.

    Raises:
        PerfModelError: a key that no framework has, or a value that it cannot have.
    """
    if not changes:
        return framework
    try:
        return framework.replace(**checked_fields(Framework, changes, place, FRAMEWORK_FACTS))
    except PerfModelError as error:
        raise (error if place in str(error) else PerfModelError(f"{place}: {error}")) from None


def _change(data: dict[str, Any], change: str) -> None:
    """Replace one value of the file."""
    key, sign, raw = (part.strip() for part in change.partition("="))
    *tables, name = key.split(".")
    if not sign or not name:
        raise PerfModelError(f"--set {change}: not KEY=VALUE, like job.seq_len=4096")
    # A layout in its notation becomes a table, so that one key of it can be changed.
    if tables == ["layout"] and isinstance(data.get("layout"), str):
        data["layout"] = {
            field: written(value) for field, value in Layout.stated(data["layout"]).items()
        }
    # Tables that are not there yet are made, so that a change may add a whole section.
    table_value: Any = data
    for table in tables:
        table_value = table_value.setdefault(table, {})
        if not isinstance(table_value, dict):
            raise PerfModelError(
                f"--set {change}: {table} is a value ({table_value!r}) and not a table; set {table}=... instead"
            )
    table_value[name] = toml_value(raw)


def toml_value(raw: str) -> Any:
    """Parse text as a TOML value; plain text if it is not one."""
    try:
        return parse_toml(f"value = {raw}")["value"]
    except ValueError:
        return raw


def _path_beside(folder: Path, value: Any) -> Any:
    """The path of a file in the job file's folder; other values unchanged."""
    if isinstance(value, str) and value.partition("@")[0].endswith((".toml", ".json")):
        return str(folder / value)
    return value


def _with_schedule_below(layout: Any, folder: Path | None, place: str) -> Any:
    """A layout from a file; its schedule file, if any, must be inside a given folder.

    Whoever writes a job file must not choose what else is read: only the command line names any
    file.

    Args:
        layout: the file's layout, a table or text.
        folder: folder that a schedule's file must lie below; None where none may be read.

    Raises:
        PerfModelError: the schedule is in a file elsewhere.
    """
    fields = layout
    if isinstance(layout, str):
        fields = dict(part.split("=", 1) for part in layout.split(",") if "=" in part)
    schedule = fields.get("schedule", "") if isinstance(fields, dict) else ""
    # `file:PATH` is the only value of a layout that makes this program read a file.
    kind, colon, name = str(schedule).strip().partition(":")
    if kind.strip().lower() != "file" or not colon:
        return layout
    if folder is None:
        raise PerfModelError(
            f"{place}: schedule={schedule}: a schedule file can be given only on the command line or in a job file"
        )
    # Resolved, so that neither `..` nor a link leads out of the folder.
    path = (folder / name.strip()).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise PerfModelError(
            f"{place}: schedule={schedule} is not in {folder.resolve()}; put it next to the job file, or give "
            "--set layout.schedule=file:PATH"
        )
    below = f"file:{path}"
    if isinstance(layout, str):
        return layout.replace(f"{schedule}", below, 1)
    return {**fields, "schedule": below}


def _layout(data: Mapping[str, Any], place: str) -> str:
    """The layout in its notation, with its keys checked."""
    notation = data.get("layout", "")
    if isinstance(notation, dict):
        # TOML has lists where a layout has tuples.
        values = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in notation.items()
        }
        notation = ",".join(f"{key}={written(value)}" for key, value in values.items())
    if not isinstance(notation, str):
        raise PerfModelError(
            f"{place}: layout must be a table, or text like 'tp=8,pp=4', got {notation!r}"
        )
    # The framework fills in the rest later: of a part of a layout only keys and values can be
    # wrong.
    if notation:
        try:
            Layout.stated(notation)
        except PerfModelError as error:
            raise PerfModelError(f"{place} [layout]: {error}") from None
    return notation


PROBLEM_WORDS: Final = ("devices", "job", "framework", *JOB_WORDS)
"""Keywords of `problem` other than model and cluster."""
LAYOUT_WORDS: Final = tuple(key_fields(Layout))
StatedLayout = Layout | str | Mapping[str, Any]
"""A layout, its notation, or its fields by name."""
Named = Problem | Model | JobFile | Path | str
"""Values that specify a model or a whole problem."""


def problem(
    model: Named,
    cluster: Cluster | str | None = None,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **of_job: Unpack[JobKeywords],
) -> Problem:
    """Build the problem from the arguments of `predict`, `search` and similar functions.

    Args:
        model: catalog name, path of a Hugging Face `config.json` or TOML, or a `Model`; the path of
            a job file, whose keys apply unless an argument overrides them; or a complete `Problem`,
            which is returned as it is.
        cluster: catalog name, path of a TOML, or a `Cluster`.
        global_batch: sequences (images) per step over all replicas.
        seq_len: tokens per sequence; the model's own if not given.
        dtype: element type; the first of bf16, fp16 and fp32 that the device has if not given.
        devices: number of devices to lay the model out on.
        job: attention kind, optimizer and so on. A `Job` is used as it is and overrides
            `global_batch`, `seq_len` and `dtype`. Given as fields by name
            (`{"optimizer": "muon"}`), the framework supplies those that are left out.
        framework: the training framework, `name`, `name@year`, path of a TOML, or a `Framework`;
            `generic` if not given. It supplies the defaults of the job.
        of_job: further fields of `Job` by name: `mode`, `flash_attention`, `optimizer` and so on.

    Raises:
        UnknownNameError: for names that are not in the catalog, and unknown arguments.
        PerfModelError: an argument is missing, or is given in addition to a complete problem.
    """
    stated: dict[str, Any] = {**of_job} | {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "devices": devices,
        "job": job,
        "framework": framework,
    }
    return problem_and_layout(model, cluster, **stated)[0]


def problem_and_layout(
    model: Named,
    cluster: Cluster | str | None = None,
    layout: StatedLayout = "",
    **stated: Any,
) -> tuple[Problem, Layout | str]:
    """Build the problem and the layout; the default layout is that of the job file.

    Args:
        model, cluster: as in `problem`.
        layout: a `Layout`, its notation, or its fields by name.
        stated: keywords as `problem` takes them; fields of `Layout` by name, instead of `layout`.

    Raises:
        UnknownNameError, PerfModelError: as `problem`; a layout that is given twice.
    """
    # Callers mix fields of a layout with words of a problem as keywords
    # (`predict(..., tp=8, seq_len=4096)`).
    layout_fields = {name: stated.pop(name) for name in list(stated) if name in LAYOUT_WORDS}
    layout_fields = {name: value for name, value in layout_fields.items() if value is not None}
    if layout_fields and layout:
        raise PerfModelError(
            f"the layout is given twice, as layout= and as {', '.join(layout_fields)}; leave one out"
        )
    # A notation, not a `Layout`: what it leaves out is the framework's to fill in.
    layout = layout_in_words(layout_fields or layout)
    stated = {name: value for name, value in stated.items() if value is not None}
    # A whole problem leaves nothing to fill in, and further settings would contradict it.
    if isinstance(model, Problem):
        given_twice = list(stated) if cluster is None else ["cluster", *stated]
        if given_twice:
            raise PerfModelError(
                f"a Problem already states everything: leave out {', '.join(given_twice)}, or use problem.replace(...)"
            )
        return model, layout

    # Keywords of the caller override the job file.
    file = unfiled(model)
    named: Any = model
    if file is not None:
        file_fields = dict(file.problem_fields)
        named = file_fields.pop("model", None)
        cluster_of_file = file_fields.pop("cluster", None)
        cluster = cluster or cluster_of_file
        layout = layout or file.layout
        stated = file_fields | stated
        if named is None:
            raise PerfModelError(
                f"{file.place}: the job file names no model; add model = 'NAME' (perfmodel catalog models)"
            )
    # Misspelled keywords must not pass as settings that happen to have no effect.
    unknown_name = next((name for name in stated if name not in PROBLEM_WORDS), None)
    if unknown_name:
        raise UnknownNameError("argument", unknown_name, (*PROBLEM_WORDS, *LAYOUT_WORDS))
    if cluster is None:
        raise PerfModelError("the cluster is missing; give a catalog name, TOML or Cluster")
    model = named_model(named)
    cluster = named_cluster(cluster)
    framework = named_framework(stated.pop("framework", "generic"))
    devices = stated.pop("devices", None)
    job = _job_of(framework, model, cluster, stated)
    complete = Problem(model=model, cluster=cluster, job=job, framework=framework, devices=devices)
    return complete, layout


def _job_of(framework: Framework, model: Model, cluster: Cluster, stated: dict[str, Any]) -> Job:
    """The job, which is stated as a whole or as changes to its framework's defaults."""
    job = stated.pop("job", None)
    if job is not None and not isinstance(job, Mapping):
        return job
    if job is not None:
        unknown = set(job) - set(JOB_WORDS)
        if unknown:
            raise UnknownNameError("keyword of a job", str(min(unknown)), JOB_WORDS)
        stated = stated | dict(job)
    if "global_batch" not in stated:
        raise PerfModelError(
            "global_batch is missing; give the sequences per step over all replicas"
        )
    # Defaults of the cluster are reported together with those of the job.
    job = framework.job(model, cluster.device, **stated)
    return replace(job, assumed=(*job.assumed, *cluster.assumed))


def layout_in_words(layout: StatedLayout) -> Layout | str:
    """Convert layout fields to a notation; missing fields take the framework's defaults.

    Raises:
        UnknownNameError: a field that no layout has.
    """
    if isinstance(layout, (Layout, str)):
        return layout
    unknown = next((name for name in layout if name not in LAYOUT_WORDS), None)
    if unknown:
        raise UnknownNameError("field of a layout", str(unknown), LAYOUT_WORDS)
    return written_values(dict(layout))


def unfiled(model: Named) -> JobFile | None:
    """The job file given in place of a model; None if a model is given."""
    if isinstance(model, JobFile):
        return model
    return read_job(model) if is_job_file(model) else None  # pyright: ignore[reportArgumentType]


shorten_reprs(__name__)
