"""Sentences on what a launch file leaves open, and on what was filled in."""

from collections.abc import Sequence
from typing import Final

from perfmodel.ingest.launch._format import Stated
from perfmodel.ingest.launch._harm import SUBJECTS, Harm, Unread
from perfmodel.ingest.launch._launch import BATCHES, JOB_FIELDS, LAYOUT_FIELDS, STATED_BY, Overrides
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Model
from perfmodel.units import plural

_REPORTED: Final = (
    *LAYOUT_FIELDS,
    *JOB_FIELDS,
    "seq_len",
    "global_batch",
    "grad_accum",
    "local_batch",
    "device_batch",
    "nodes",
)
"""Fields whose defaults are reported."""


def assumptions(
    stated: Stated,
    overrides: Overrides,
    framework_label: str,
    model: Model | None,
    default_micro_batch: int,
    global_batch: int | None,
) -> tuple[str, ...]:
    """A sentence for each setting that neither the file nor the caller states, with the flag that
    sets it.

    Args:
        framework_label: the framework whose defaults were filled in.
        model: the settled model.
        default_micro_batch: the framework's default.
        global_batch: the settled global batch.
    """
    known = stated.defaults | stated.fields
    assumed = _assumed(stated, overrides, framework_label)
    assumed += [
        text for key, text in known.items() if key.startswith("note.") and key != "note.vocabulary"
    ]
    # A model that is given or named has its own vocabulary, whatever the name of the tokenizer.
    if model is not None and overrides.model is None and "model" not in known:
        assumed += [*_assumed_sizes(stated, framework_label), *_assumed_vocabulary(stated)]
    if not any(key in known for key in BATCHES) and not overrides.sets("micro_batch"):
        assumed.append(
            f"micro_batch={default_micro_batch} (the file does not state it; --layout micro_batch=N sets another)"
        )
    if (
        global_batch is not None
        and not overrides.global_batch
        and not {"global_batch", "grad_accum"} & set(known)
    ):
        assumed.append(
            f"global_batch={global_batch} (the file states no accumulation; --global-batch sets another)"
        )
    if model is not None and "seq_len" not in known and overrides.seq_len is None:
        assumed.append(
            f"seq_len={model.seq_len:,} (the file does not state it; this is the length of {model.name}; "
            "--seq-len sets another)"
        )
    return tuple(assumed)


def doubts_of_rules(known: Fields, overrides: Overrides) -> list[str]:
    """Doubts stated by rules of the format, except about settings that the caller states."""
    settled = tuple(SUBJECTS[harm] for harm in overrides.settled)
    doubts = []
    for key, text in known.items():
        if key.startswith("doubt.") and not (settled and text.startswith(settled)):
            doubts.append(text)
    return doubts


def ignored_settings(unread: Sequence[Unread], notes: Sequence[str]) -> tuple[str, ...]:
    """Settings that were not understood and parts that were not read; those that can only change
    the time come last."""
    worst = [str(setting) for setting in unread if setting.harm < Harm.TIME]
    costing_time = [str(setting) for setting in unread if setting.harm is Harm.TIME]
    # Readers stop after the first lines of a list; an unread kernel option
    # costs percents, an unread model key everything.
    return (*worst, *notes, *costing_time)


def missing_model(known: Fields) -> str:
    if "model" in known:
        return f"the catalog has no model {known['model']!r}; give --model with its config.json or a TOML"
    return "the file does not state the model; give --model"


def missing_replicas(known: Fields, devices: int | None) -> str:
    if devices is None:
        return "the file does not state the number of devices; give --devices"
    tp = known.get("tp", 1)
    cp = known.get("cp", 1)
    pp = known.get("pp", 1)
    return f"{devices} devices are not a multiple of its tp*cp*pp = {tp}*{cp}*{pp}; give --devices or --layout"


def _assumed(stated: Stated, overrides: Overrides, default_name: str) -> list[str]:
    filled = []
    for key, value in stated.defaults.items():
        # Two batches that are stated leave no choice of the accumulation between them.
        follows = key == "grad_accum" and {"global_batch", "micro_batch"} <= stated.fields.keys()
        if (
            key in _REPORTED
            and key not in stated.fields
            and STATED_BY.get(key) not in stated.fields
            and not follows
            and not overrides.sets(key)
        ):
            shown_value = str(value).lower() if isinstance(value, bool) else value
            filled.append(f"{key}={shown_value}")
    if not filled:
        return []
    return [f"{', '.join(filled)} ({default_name}'s {plural('default', len(filled))})"]


_SIZES: Final = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")


def _assumed_sizes(stated: Stated, default_name: str) -> list[str]:
    """A sentence on sizes of the model that the framework fills in."""
    filled = [
        f"{name}={stated.defaults[f'model.{name}']}"
        for name in _SIZES
        if f"model.{name}" in stated.defaults and f"model.{name}" not in stated.fields
    ]
    if filled:
        return [f"a model of {', '.join(filled)} ({default_name}'s own sizes; --model sets others)"]
    return []


def _assumed_vocabulary(stated: Stated) -> list[str]:
    """A sentence on a vocabulary that follows from the tokenizer's name, or that the framework
    fills in."""
    if "note.vocabulary" in stated.fields:
        return [stated.fields["note.vocabulary"]]
    if "model.vocab" in stated.fields or "model.vocab" not in stated.defaults:
        return []
    size = stated.defaults["model.vocab"]
    return [
        f"a vocabulary of {size:,} (the file names no tokenizer of known size; --model sets another)"
    ]
