"""Records in sections are made, changed, read and stated by flat keys."""

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.spec import (
    Framework,
    Job,
    Layout,
    Sectioned,
    Transformer,
    documented,
    key_fields,
    nested,
)
from perfmodel.spec.framework_facts import MemoryCosts

RECORDS: list[type[Sectioned]] = [Framework, Job, Transformer]
MOST_FIELDS = 25


def sections_of(kind: type) -> list[type]:
    """The record and all records that its keys lie in."""
    return [kind, *{entry.home for entry in key_fields(kind).values()} - {kind}]


def of_catalog() -> list[Framework]:
    return [
        version for name in catalog.frameworks() for version in catalog.framework_versions(name)
    ]


@pytest.mark.parametrize("kind", RECORDS)
def test_no_section_is_too_wide_to_hold_in_mind(kind: type) -> None:
    for home in sections_of(kind):
        keys = [key for key, entry in key_fields(kind).items() if entry.home is home]
        assert len(keys) <= MOST_FIELDS, home


@pytest.mark.parametrize("kind", RECORDS)
def test_every_key_says_what_it_is(kind: type) -> None:
    for key, entry in key_fields(kind).items():
        assert documented(entry.home)[key] or key == "name", key


@pytest.mark.parametrize("framework", of_catalog(), ids=lambda framework: framework.label)
def test_a_record_is_made_of_its_values(framework: Framework) -> None:
    values = framework.values()
    assert Framework(**values) == framework == Framework().replace(**values)
    assert all(framework.value(key) == value for key, value in values.items())


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "t5-11b", "bert-large"])
def test_a_model_is_made_of_its_values(name: str) -> None:
    model = catalog.model(name)
    assert isinstance(model, Transformer)
    assert Transformer(**model.values()) == model == model.replace(**model.values())


@pytest.mark.parametrize("name", ["generic", "megatron-core", "maxtext", "torchtitan"])
def test_a_job_is_made_of_its_values(name: str) -> None:
    model, cluster = catalog.model("mixtral-8x7b"), catalog.cluster("dgx-h100")
    job = catalog.framework(name).job(
        model, cluster.device, global_batch=64, dtype="fp8", frozen=True
    )
    assert Job(**job.values()) == job == job.replace(**job.values())


def test_what_a_framework_states_of_jobs_are_keys_of_jobs() -> None:
    framework = catalog.framework("megatron-core")
    stated = {key for key, entry in key_fields(Framework).items() if entry.path[0] == "default_job"}
    assert stated <= set(key_fields(Job))
    assert all(framework.value(key) == framework.default_job.value(key) for key in stated)


def test_a_key_changes_its_own_value_alone() -> None:
    framework = Framework()
    for key, entry in key_fields(Framework).items():
        other: Any = {bool: lambda value: not value, int: lambda value: value + 1}.get(
            entry.hint, lambda value: value
        )
        changed = framework.replace(**{key: other(framework.value(key))})
        assert changed.values() == framework.values() | {key: other(framework.value(key))}


def test_defaults_are_those_of_the_sections() -> None:
    for key, value in Framework().values().items():
        assert key_fields(Framework)[key].default in (value, MISSING)


def test_two_fields_with_one_key_are_refused() -> None:
    (section,) = (part.metadata for part in fields(Framework) if part.name == "memory")

    @dataclass(frozen=True)
    class Doubled:
        memory: MemoryCosts = field(default=MemoryCosts(), metadata=section)
        bucket_bytes: float = 0.0

    with pytest.raises(ValueError, match="Doubled has two fields with the key bucket_bytes"):
        key_fields(Doubled)


def test_a_key_beside_its_section_changes_that_section() -> None:
    memory = MemoryCosts(context_bytes=3.0, ddp_buckets=True)
    assert Framework(memory=memory, context_bytes=4.0).memory == replace(memory, context_bytes=4.0)
    job = Job(global_batch=8, seq_len=128, flash_attention=False, optimizer="muon")
    assert replace(job, fused_kernels=False).kernels == replace(job.kernels, fused_kernels=False)
    assert replace(job, global_batch=4, flash_attention=True) == Job(
        global_batch=4, seq_len=128, optimizer="muon"
    )


def test_files_name_keys_and_no_sections_and_what_is_neither_is_refused() -> None:
    assert nested(Framework, {"bucket_bytes": 1.0, "florp": 2}) == {"memory": {"bucket_bytes": 1.0}}
    with pytest.raises(
        UnknownNameError, match=r"field of Framework 'bucket_byte'; did you mean 'bucket_bytes'"
    ):
        Framework(bucket_byte=1.0)
    with pytest.raises(PerfModelError, match=r"here: bucket_bytes: .*; memory: unknown key"):
        catalog.checked(
            Framework, {"bucket_bytes": "many", "memory": {"bucket_bytes": 1.0}}, "here"
        )


PLAIN: tuple[Job | Layout, ...] = (Job(global_batch=8, seq_len=1024), Layout())
SWITCHES = [
    pytest.param(record, key, id=f"{type(record).__name__}-{key}")
    for record in PLAIN
    for key, entry in key_fields(type(record)).items()
    if entry.hint is bool
]


@pytest.mark.parametrize(("record", "key"), SWITCHES)
@pytest.mark.parametrize("value", ["all", "no", "", 1, 0, None])
def test_a_switch_is_true_or_false(record: Job | Layout, key: str, value: object) -> None:
    """Python takes the text "no" for true, and would answer another question."""
    with pytest.raises(LayoutError, match=f"{key} must be true or false"):
        record.replace(**{key: value})
