"""Problems by names and words."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from perfmodel.catalog._clusters import cluster as named_cluster
from perfmodel.catalog._frameworks import framework as named_framework
from perfmodel.catalog._models import model as named_model
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Cluster, Framework, Job, Model, Problem

PROBLEM_WORDS: Final = ("global_batch", "seq_len", "devices", "job", "framework")
"""What `problem` takes beside model and cluster."""
_JOB_WORDS: Final = frozenset(f.name for f in fields(Job)) - {"global_batch", "seq_len", "dtype", "assumed"}


def problem(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
) -> Problem:
    """A problem of the words that `predict`, `search` and the like take.

    Args:
        model: catalog name, path of a Hugging Face `config.json` or TOML, or a `Model`; or a whole `Problem`, which is
            returned as it is.
        cluster: catalog name, path of a TOML, or a `Cluster`.
        global_batch: sequences (images) per step over all replicas.
        seq_len: tokens per sequence; the model's own if not given.
        dtype: element type; the first of bf16, fp16 and fp32 that the device has if not given.
        devices: to lay the model out on.
        job: attention kind, optimizer and so on. A `Job` overrides `global_batch`, `seq_len` and `dtype`, and is taken
            at its word; of fields by name (`{"optimizer": "muon"}`) the others are as the framework has them.
        framework: the training framework, `name`, `name@year`, path of a TOML, or a `Framework`; `generic` if not
            given. A job that is not given is as it has it.

    Raises:
        UnknownNameError: for names that no catalog has.
        PerfModelError: a word is missing, or given beside a whole problem.
    """
    words = {
        "cluster": cluster, "global_batch": global_batch, "seq_len": seq_len, "dtype": dtype, "devices": devices,
        "job": job, "framework": framework,
    }  # fmt: skip
    if isinstance(model, Problem):
        if given := [word for word, value in words.items() if value is not None]:
            raise PerfModelError(
                f"a problem is whole: it cannot have {', '.join(given)} besides; problem.replace(...) can"
            )
        return model
    if cluster is None:
        raise PerfModelError("a cluster is needed: catalog name, TOML or Cluster")
    model = named_model(model) if isinstance(model, str) else model
    cluster = named_cluster(cluster) if isinstance(cluster, str) else cluster
    framework = framework if isinstance(framework, Framework) else named_framework(framework or "generic")
    if not isinstance(job, Job):
        if global_batch is None:
            raise PerfModelError("global_batch is needed: sequences per step over all replicas")
        if unknown := set(job or ()) - _JOB_WORDS:
            raise UnknownNameError("word of a job", str(min(unknown)), _JOB_WORDS)
        job = framework.job(model, cluster.device, global_batch=global_batch, seq_len=seq_len, dtype=dtype, **job or {})
    return Problem(model=model, cluster=cluster, job=job, framework=framework, devices=devices)
