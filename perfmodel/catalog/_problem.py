"""Problems by names and words, or from a job file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog._clusters import cluster as named_cluster
from perfmodel.catalog._frameworks import framework as named_framework
from perfmodel.catalog._job_file import JOB_WORDS, JobFile, is_job_file, read_job
from perfmodel.catalog._models import model as named_model
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem

PROBLEM_WORDS: Final = ("devices", "job", "framework", *JOB_WORDS)
"""What `problem` takes beside model and cluster."""
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
    **of_job: Any,
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
    words = of_job | {
        "global_batch": global_batch, "seq_len": seq_len, "dtype": dtype, "devices": devices, "job": job,
        "framework": framework,
    }  # fmt: skip
    return problem_and_layout(model, cluster, **words)[0]


def problem_and_layout(
    model: Named, cluster: Cluster | str | None = None, layout: Layout | str = "", **words: Any
) -> tuple[Problem, Layout | str]:
    """`problem`, and the layout: that of the job file where none is given.

    Raises:
        UnknownNameError, PerfModelError: as `problem`.
    """
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
        raise UnknownNameError("word of a problem", unknown, PROBLEM_WORDS)
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
    return Problem(model=found, cluster=cluster, job=job, framework=framework, devices=devices), layout


def unfiled(model: Named) -> JobFile | None:
    """The job file that stands for a problem; None where a model stands there itself."""
    if isinstance(model, JobFile):
        return model
    return read_job(model) if is_job_file(model) else None  # pyright: ignore[reportArgumentType]
