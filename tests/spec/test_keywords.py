"""Keywords that editors complete are the fields that the functions take."""

import inspect
from dataclasses import MISSING, fields
from typing import get_type_hints

import pytest

import perfmodel as pm
from perfmodel.catalog.job_files import JOB_WORDS
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.layouts.search_words import SEARCH_WORDS, SearchKeywords
from perfmodel.serving import ServingKeywords, ServingOptions
from perfmodel.spec import Job, Layout, Transformer, key_fields
from perfmodel.spec.keywords import JobKeywords, LayoutKeywords, StepKeywords, TransformerKeywords

EXPLICIT = {"global_batch", "seq_len", "dtype"}
PROBLEM_FUNCTIONS = [
    pm.predict,
    pm.whatif,
    pm.search,
    pm.problem,
    pm.report,
    pm.compare_clusters,
    pm.compare_schedules,
    pm.partition,
    pm.step_time_function,
]
JOB = {"model": "llama3-8b", "cluster": "dgx-h100", "global_batch": 64}


def types(owner: type) -> dict[str, object]:
    names = [f.name for f in fields(owner)]  # pyright: ignore[reportArgumentType]
    hints = get_type_hints(owner)
    return {name: hints[name] for name in names}


def test_keywords_of_layouts_and_jobs_are_their_fields() -> None:
    layout = {name: entry.hint for name, entry in key_fields(Layout).items()}
    assert get_type_hints(LayoutKeywords) == layout
    job = {name: key_fields(Job)[name].hint for name in JOB_WORDS if name not in EXPLICIT}
    assert get_type_hints(JobKeywords) == job
    assert get_type_hints(StepKeywords) == layout | job


def test_keywords_of_a_model_are_its_fields_but_for_those_that_it_needs() -> None:
    by_key = key_fields(Transformer)
    optional = {key: entry.hint for key, entry in by_key.items() if entry.default is not MISSING}
    assert get_type_hints(TransformerKeywords) == optional
    needed = set(by_key) - set(optional)
    tiny = Transformer(
        name="tiny",
        layers=1,
        hidden=64,
        heads=1,
        kv_heads=1,
        head_dim=64,
        ffn_hidden=64,
        vocab=64,
        seq_len=8,
    )
    assert needed == {
        "name",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn_hidden",
        "vocab",
        "seq_len",
    }
    assert tiny.values() == {key: tiny.value(key) for key in needed} | {
        key: by_key[key].default for key in optional
    }


def test_keywords_of_a_search_are_its_words() -> None:
    of_search = set(SearchKeywords.__annotations__)
    assert of_search - set(JobKeywords.__annotations__) == set(SEARCH_WORDS)


@pytest.mark.parametrize("function", PROBLEM_FUNCTIONS)
def test_the_words_of_a_problem_are_named(function: object) -> None:
    parameters = inspect.signature(function).parameters  # pyright: ignore[reportArgumentType]
    assert {"global_batch", "seq_len", "dtype", "devices", "job", "framework"} <= set(parameters)


def test_no_public_function_takes_whatever_it_is_given() -> None:
    """Editors and type checkers know every keyword: `**words` are of a `TypedDict`."""
    for name in dir(pm):
        function = getattr(pm, name)
        if not inspect.isfunction(function):
            continue
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                assert "Keywords" in str(parameter.annotation), name


def test_keywords_of_a_server_are_its_fields() -> None:
    assert get_type_hints(ServingKeywords) == types(ServingOptions)


def test_a_layout_in_every_form_is_the_same() -> None:
    text = pm.predict(**JOB, layout="tp=4,dp=2,zero=1,recompute=selective")
    forms = (
        pm.predict(**JOB, layout={"tp": 4, "dp": 2, "zero": 1, "recompute": "selective"}),
        pm.predict(**JOB, tp=4, dp=2, zero=1, recompute="selective"),
        pm.predict(**JOB, layout=text.layout),
    )
    assert {text.step_time_s} == {form.step_time_s for form in forms}
    assert {text.layout} == {form.layout for form in forms}
    assert pm.whatif(**JOB, tp=4, dp=2, zero=1, recompute="selective").before_s == text.step_time_s


def test_what_a_layout_in_words_does_not_say_is_as_the_framework_has_it() -> None:
    words = JOB | {"framework": "megatron-core"}
    assert pm.predict(**words, tp=4, dp=2).layout == pm.predict(**words, layout="tp=4,dp=2").layout


def test_pieces_by_name() -> None:
    uneven = {"pp": 2, "dp": 2, "partition": (15, 17)}
    assert (
        pm.predict(**JOB, **uneven).layout
        == pm.predict(**JOB, layout="pp=2,dp=2,partition=15-17").layout
    )


def test_a_layout_that_is_given_twice_or_has_another_field_is_refused() -> None:
    with pytest.raises(PerfModelError, match="given twice"):
        pm.predict(**JOB, layout="tp=4", dp=2)
    with pytest.raises(UnknownNameError, match="field of a layout 'ttp'"):
        pm.predict(**JOB, layout={"ttp": 4})
    with pytest.raises(UnknownNameError, match="tpp"):
        pm.predict(**JOB, tpp=4)


def test_functions_that_take_a_layout_take_its_fields() -> None:
    problem = pm.problem(**JOB)
    found = pm.report(problem, layout={"tp": 4, "dp": 2, "zero": 1})
    assert found.data["rows"]
