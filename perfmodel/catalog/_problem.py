"""Problems by names and words, or from a job file: model, cluster, job, layout, framework and search space in one TOML.

At the top of a job file are `model`, `cluster` and `framework`, each a name, the path of a file, or a table as such a
file holds it, and `devices`; below it the tables `[job]` (fields of `Job`), `[layout]` (fields of `Layout`),
`[network]` (what the cluster's network is instead), `[search]` (words of `perfmodel.search`) and `[serving]` (words of
`perfmodel.serve`). A table `[model]` with `like = NAME`, and a table `[framework]` with `name = NAME`, change that
entry of the catalog. Paths are relative to the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Unpack

from perfmodel.catalog._clusters import cluster as named_cluster
from perfmodel.catalog._clusters import cluster_from_toml, with_network
from perfmodel.catalog._frameworks import framework as named_framework
from perfmodel.catalog._models import model as named_model
from perfmodel.catalog._models import model_from_toml, model_with
from perfmodel.catalog._toml import checked_fields, read_toml
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.files import parse_toml
from perfmodel.spec import Cluster, Framework, Job, JobKeywords, Layout, Model, Problem, written, written_values

JOB_WORDS: Final = tuple(f.name for f in fields(Job) if f.name != "assumed")
"""Keys of `[job]`, and words of a problem: what can be said of a job."""
FRAMEWORK_FACTS: Final = tuple(f.name for f in fields(Framework) if f.name not in ("name", "since", "sources"))
"""Keys of a table [framework] beside `name`."""
NAMED: Final = ("model", "cluster", "framework")
SECTIONS: Final = ("job", "layout", "network", "search", "serving")
JOB_FILE_KEYS: Final = (*NAMED, "devices", *SECTIONS)
"""Keys at the top of a job file."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """What a job file says, with what was set otherwise."""

    where: str
    """Its path."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """Of `catalog.problem`: model, cluster, framework, devices and fields of the job."""
    layout: str = ""
    """In the notation of `Layout`; empty where it says none."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """Words of a search, as they stand there."""
    serving: Mapping[str, Any] = field(default_factory=dict)
    """Words of a server, as they stand there."""


def is_job_file(name: object) -> bool:
    """Whether a model's name is the path of a job file instead: a TOML with a key that only those have."""
    if not isinstance(name, (str, Path)) or Path(name).suffix != ".toml":
        return False
    return any(key in read_toml(Path(name)) for key in JOB_FILE_KEYS)


def read_job(path: Path | str | None, changes: Sequence[str] = ()) -> JobFile:
    """A job file with `KEY=VALUE` put in place of what it says, such as `job.seq_len=4096` or `layout.tp=4`.

    Args:
        path: of the file; without one the changes are all there is.
        changes: keys with dots; values as TOML has them, or plain text.

    Raises:
        PerfModelError: a file that cannot be read; a key that there is not or a value that it cannot have, by name.
    """
    where = str(path) if path is not None else "--set"
    data = read_toml(Path(path)) if path is not None else {}
    if path is not None and "layout" in data:
        data["layout"] = _with_schedule_below(data["layout"], Path(path).parent, where)
    for change in changes:
        _change(data, change)
    return job_from_toml(data, where, Path(path).parent if path is not None else Path())


def job_from_toml(data: Mapping[str, Any], where: str, folder: Path | None = None) -> JobFile:
    """What a parsed job file says, or a row of a table whose columns are keys of job files.

    Args:
        where: its name in messages.
        folder: that paths in it are relative to.

    Raises:
        PerfModelError: a key that there is not or a value that it cannot have, by name.
    """
    for key, value in data.items():
        if key not in JOB_FILE_KEYS:
            under = f"{key} belongs under [job]" if key in JOB_WORDS else UnknownNameError("key", key, JOB_FILE_KEYS)
            raise PerfModelError(f"{where}: {under} (launch files are for --from)")
        if key in ("job", "search", "serving", "network") and not isinstance(value, dict):
            raise PerfModelError(f"{where}: {key} must be a table, [{key}], got {value!r}")
        if key in NAMED and not isinstance(value, str | dict):
            raise PerfModelError(f"{where}: {key} must be a name or the path of a file, got {value!r}")
    if folder is None and "layout" in data:
        _with_schedule_below(data["layout"], None, where)
    words = {key: _beside(folder or Path(), data[key]) for key in NAMED if key in data}
    stem = Path(where).stem
    if isinstance(words.get("model"), dict):
        words["model"] = _model_table(words["model"], f"{where} [model]", stem)
    if isinstance(words.get("cluster"), dict):
        words["cluster"] = cluster_from_toml(words["cluster"], f"{where} [cluster]", stem)
    if isinstance(words.get("framework"), dict):
        changes = dict(words["framework"])
        base = named_framework(str(changes.pop("name", "generic")))
        words["framework"] = framework_with(changes, base, f"{where} [framework]")
    if "network" in data:
        if "cluster" not in words:
            raise PerfModelError(f"{where} [network]: it changes the network of a cluster; name one")
        words["cluster"] = with_network(named_cluster(words["cluster"]), data["network"], f"{where} [network]")
    if "devices" in data:
        if type(data["devices"]) is not int:
            raise PerfModelError(f"{where}: devices must be a whole number, got {data['devices']!r}")
        words["devices"] = data["devices"]
    words |= checked_fields(Job, data.get("job", {}), f"{where} [job]", JOB_WORDS)
    return JobFile(
        where=where,
        words=words,
        layout=_layout(data, where),
        search=data.get("search", {}),
        serving=data.get("serving", {}),
    )


def _model_table(table: dict[str, Any], where: str, stem: str) -> Model:
    """The model of a table [model]: whole, or one of the catalog (`like`) with some fields changed."""
    table = dict(table)
    like = table.pop("like", None)
    if like is None:
        return model_from_toml({"name": stem} | table, where)
    return model_with(named_model(str(like)), table, where)


def framework_with(changes: Mapping[str, Any], framework: Framework, where: str) -> Framework:
    """A framework with some facts stated otherwise, by the names of its fields.

    Raises:
        PerfModelError: a key that no framework has, or a value that it cannot have.
    """
    if not changes:
        return framework
    try:
        return replace(framework, **checked_fields(Framework, changes, where, FRAMEWORK_FACTS))
    except PerfModelError as error:
        raise error if where in str(error) else PerfModelError(f"{where}: {error}") from None


def _change(data: dict[str, Any], change: str) -> None:
    """Put one value in place of what the file has there."""
    key, sign, raw = (part.strip() for part in change.partition("="))
    *tables, name = key.split(".")
    if not sign or not name:
        raise PerfModelError(f"--set {change}: not KEY=VALUE, like job.seq_len=4096")
    if tables == ["layout"] and isinstance(data.get("layout"), str):
        data["layout"] = {field: written(value) for field, value in Layout.values(data["layout"]).items()}
    at: Any = data
    for table in tables:
        at = at.setdefault(table, {})
        if not isinstance(at, dict):
            raise PerfModelError(f"--set {change}: {table} is {at!r} there, no table; set {table}=... as a whole")
    at[name] = toml_value(raw)


def toml_value(raw: str) -> Any:
    """A value as TOML has it, plain text where it is none."""
    try:
        return parse_toml(f"value = {raw}")["value"]
    except ValueError:
        return raw


def _beside(folder: Path, value: Any) -> Any:
    """The path of a file that stands beside the job file; anything else as it is."""
    if isinstance(value, str) and value.partition("@")[0].endswith((".toml", ".json")):
        return str(folder / value)
    return value


def _with_schedule_below(layout: Any, folder: Path | None, where: str) -> Any:
    """A layout of a file, whose schedule may be in another file only if that lies below a folder.

    Whoever writes a job file must not choose what else is read: only the command line names any file.

    Args:
        layout: as it stands in the file, a table or text.
        folder: that a schedule's file must lie below; None where none may be read.

    Raises:
        PerfModelError: the schedule is in a file elsewhere.
    """
    fields = layout
    if isinstance(layout, str):
        fields = dict(part.split("=", 1) for part in layout.split(",") if "=" in part)
    schedule = fields.get("schedule", "") if isinstance(fields, dict) else ""
    kind, colon, name = str(schedule).strip().partition(":")
    if kind.strip().lower() != "file" or not colon:
        return layout
    if folder is None:
        raise PerfModelError(f"{where}: schedule={schedule}: only the command line and job files may name a file")
    path = (folder / name.strip()).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise PerfModelError(
            f"{where}: schedule={schedule} is not below {folder.resolve()}; put it beside the job file, or say "
            "--set layout.schedule=file:PATH"
        )
    below = f"file:{path}"
    if isinstance(layout, str):
        return layout.replace(f"{schedule}", below, 1)
    return {**fields, "schedule": below}


def _layout(data: Mapping[str, Any], where: str) -> str:
    """The layout in its notation, checked as far as its keys go."""
    said = data.get("layout", "")
    if isinstance(said, dict):
        said = ",".join(f"{key}={written(tuple(v) if isinstance(v, list) else v)}" for key, v in said.items())
    if not isinstance(said, str):
        raise PerfModelError(f"{where}: layout must be a table, or text like 'tp=8,pp=4', got {said!r}")
    if said:
        try:
            Layout.values(said)
        except PerfModelError as error:
            raise PerfModelError(f"{where} [layout]: {error}") from None
    return said


PROBLEM_WORDS: Final = ("devices", "job", "framework", *JOB_WORDS)
"""What `problem` takes beside model and cluster."""
LAYOUT_WORDS: Final = tuple(f.name for f in fields(Layout))
StatedLayout = Layout | str | Mapping[str, Any]
"""A layout, its notation, or its fields by name."""
Named = Problem | Model | JobFile | Path | str
"""What stands for a model or a whole problem."""


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
    """A problem of the words that `predict`, `search` and the like take.

    Args:
        model: catalog name, path of a Hugging Face `config.json` or TOML, or a `Model`; the path of a job file, whose
            words hold where nothing else is said; or a whole `Problem`, which is returned as it is.
        cluster: catalog name, path of a TOML, or a `Cluster`.
        global_batch: sequences (images) per step over all replicas.
        seq_len: tokens per sequence; the model's own if not given.
        dtype: element type; the first of bf16, fp16 and fp32 that the device has if not given.
        devices: to lay the model out on.
        job: attention kind, optimizer and so on. A `Job` overrides `global_batch`, `seq_len` and `dtype`, and is taken
            at its word; of fields by name (`{"optimizer": "muon"}`) the others are as the framework has them.
        framework: the training framework, `name`, `name@year`, path of a TOML, or a `Framework`; `generic` if not
            given. A job that is not given is as it has it.
        of_job: further fields of `Job` by name: `mode`, `flash_attention`, `optimizer` and so on.

    Raises:
        UnknownNameError: for names that no catalog has, and words that no job has.
        PerfModelError: a word is missing, or given beside a whole problem.
    """
    words: dict[str, Any] = {**of_job} | {
        "global_batch": global_batch, "seq_len": seq_len, "dtype": dtype, "devices": devices, "job": job,
        "framework": framework,
    }  # fmt: skip
    return problem_and_layout(model, cluster, **words)[0]


def problem_and_layout(
    model: Named, cluster: Cluster | str | None = None, layout: StatedLayout = "", **words: Any
) -> tuple[Problem, Layout | str]:
    """`problem`, and the layout: that of the job file where none is given.

    Args:
        model, cluster: as in `problem`.
        layout: a `Layout`, its notation, or its fields by name.
        words: as `problem` takes them; fields of `Layout` by name, instead of `layout`.

    Raises:
        UnknownNameError, PerfModelError: as `problem`; a layout that is given twice.
    """
    layout_fields = {word: words.pop(word) for word in list(words) if word in LAYOUT_WORDS}
    layout_fields = {word: value for word, value in layout_fields.items() if value is not None}
    if layout_fields and layout:
        raise PerfModelError(f"the layout is given twice: as layout= and as {', '.join(layout_fields)}; leave one out")
    layout = layout_in_words(layout_fields or layout)
    words = {word: value for word, value in words.items() if value is not None}
    if isinstance(model, Problem):
        if given := [*(("cluster",) if cluster is not None else ()), *words]:
            raise PerfModelError(
                f"a problem is whole: it cannot have {', '.join(given)} besides; problem.replace(...) can"
            )
        return model, layout
    file = unfiled(model)
    named: Any = model
    if file is not None:
        said = dict(file.words)
        named, of_file = said.pop("model", None), said.pop("cluster", None)
        cluster, layout, words = cluster or of_file, layout or file.layout, said | words
        if named is None:
            raise PerfModelError(f"{file.where}: it names no model; give model = 'NAME' (perfmodel catalog models)")
    if unknown := next((word for word in words if word not in PROBLEM_WORDS), None):
        raise UnknownNameError("argument", unknown, (*PROBLEM_WORDS, *LAYOUT_WORDS))
    if cluster is None:
        raise PerfModelError("a cluster is needed: catalog name, TOML or Cluster")
    found, cluster = named_model(named), named_cluster(cluster)
    framework, devices = named_framework(words.pop("framework", "generic")), words.pop("devices", None)
    job = words.pop("job", None)
    if isinstance(job, Mapping):
        if unknown := set(job) - set(JOB_WORDS):
            raise UnknownNameError("word of a job", str(min(unknown)), JOB_WORDS)
        words, job = words | dict(job), None
    if job is None:
        if "global_batch" not in words:
            raise PerfModelError("global_batch is needed: sequences per step over all replicas")
        job = framework.job(found, cluster.device, **words)
        job = replace(job, assumed=(*job.assumed, *cluster.assumed))
    return Problem(model=found, cluster=cluster, job=job, framework=framework, devices=devices), layout


def layout_in_words(layout: StatedLayout) -> Layout | str:
    """A layout by its fields as its notation, in which what is not said is as the framework has it.

    Raises:
        UnknownNameError: a field that no layout has.
    """
    if isinstance(layout, (Layout, str)):
        return layout
    if unknown := next((name for name in layout if name not in LAYOUT_WORDS), None):
        raise UnknownNameError("field of a layout", str(unknown), LAYOUT_WORDS)
    return written_values(dict(layout))


def unfiled(model: Named) -> JobFile | None:
    """The job file that stands for a problem; None where a model stands there itself."""
    if isinstance(model, JobFile):
        return model
    return read_job(model) if is_job_file(model) else None  # pyright: ignore[reportArgumentType]
