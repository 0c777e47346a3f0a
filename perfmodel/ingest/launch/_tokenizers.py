"""Vocabulary sizes of tokenizers by name, for files that state only the tokenizer.

Sizes are those of the models' embeddings (`vocab_size` of their config.json), which padding has
rounded up.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._table import WHOLE, WHOLE_OR_NONE, Fields, Rule

GPT2: Final = 50257
"""Vocabulary of GPT-2's tokenizer, the frameworks' default."""
TYPES: Final = {
    "gpt2bpetokenizer": 50257,
    "llama2tokenizer": 32000,
    "llama3tokenizer": 128256,
    # `vocab_size` of `CustomTikTokenizer` is 2**17 unless a size is stated.
    "tiktokenizer": 131072,
    "bertwordpiecelowercase": 30522,
    "bertwordpiececase": 28996,
}
"""Usual vocabulary of the tokenizer types of Megatron-LM that were written for one model; they load
any file of their notation."""

_FAMILIES: Final = (
    # The first pattern that a name has in it counts: those of a version stand before those of the
    # whole family. Distilled models have the tokenizer of what they were distilled into.
    (r"r1-?distill-?llama", 128256),
    (r"r1-?distill-?qwen.*(7b|14b|32b)", 152064),
    (r"r1-?distill-?qwen", 151936),
    (r"llama-?4", 202048),
    # Not the first LLaMA of 30 or 33 billion parameters.
    (r"llama-?3(?!\d)", 128256),
    (r"code-?llama", 32016),
    (r"llama|vicuna|alpaca", 32000),
    (r"mistral-?nemo|mistral-?small|ministral|magistral|devstral|tekken", 131072),
    (r"mistral-?large|codestral", 32768),
    (r"mixtral-?8x22b", 32768),
    (r"mi[sx]tral.*v0\.3", 32768),
    (r"mi[sx]tral", 32000),
    (
        r"qwen-?2\.?5.*(7b|14b|32b|72b)|qwen-?2-(vl-|math-)?7b|qwen-?2.*72b|qwen-?1\.5.*(14b|32b|72b|110b)",
        152064,
    ),
    (r"qwen-?3\.5|qwen3\.5", 248320),
    (r"qwen", 151936),
    (r"deepseek-?v2|deepseek.*moe.*16b|deepseek-?llm", 102400),
    (r"deepseek-?(v3|v4|r1|3|4)", 129280),
    (r"kimi|moonlight", 163840),
    (r"nemotron-?3|nemotron.*nano|nemotron-?h", 131072),
    (r"nemotron", 256000),
    (r"gemma-?3-(270m|1b)", 262144),
    (r"gemma-?3", 262208),
    (r"gemma", 256000),
    (r"phi-?4-?(mini|multimodal)", 200064),
    (r"phi-?4", 100352),
    (r"phi-?3", 32064),
    (r"phi-?[12]", 51200),
    (r"gpt-?oss", 201088),
    (r"minimax", 200064),
    (r"glm-?4", 151552),
    (r"chatglm", 65024),
    (r"yi-", 64000),
    (r"baichuan-?2", 125696),
    (r"baichuan", 64000),
    (r"internlm-?2(?!0b)", 92544),
    (r"internlm", 103168),
    (r"bloom", 250880),
    (r"falcon-?3", 131072),
    (r"falcon", 65024),
    (r"gpt-?neox|pythia|^20b-tokenizer", 50432),
    (r"olmo-?[23]", 100352),
    (r"mpt-|olmo", 50432),
    (r"smollm-?2|smollm-?1|starcoder|santacoder", 49152),
    (r"smollm-?3", 128256),
    (r"mt5", 250112),
    (r"t5", 32128),
    (r"bert.*uncased", 30522),
    (r"bert.*cased", 28996),
    (r"opt-", 50272),
    # Not `JapaneseGPT2Tokenizer`, which has the type but not the vocabulary.
    (r"(?<![a-z])(distil)?gpt-?[23]", 50257),
)
"""Names of tokenizers, as patterns, and the size of each one's vocabulary."""


_TOKENS: Final = (
    (r"qwen", (151643,)),
    (r"llama-?3", (128000, 128256)),
    (r"deepseek", (100000, 128813)),
    (r"llama|mi[sx]tral", (32000,)),
)
"""Numbers of tokens of tokenizers, without those that pad a model's embedding."""
EXTRA: Final = "extra-vocab-size"
"""The argument of Pai-Megatron-Patch for the rows of the embedding beyond the tokens of the
tokenizer."""


def padded_vocabulary(name: Any, extra: int) -> int | None:
    """Rows of a model's embedding: the tokens of the tokenizer, padded to the size of a known
    model; None if no known model has this vocabulary.

    Args:
        name: name of the tokenizer's type.
        extra: rows beyond its tokens.
    """
    known = {size for _, size in _FAMILIES}
    for pattern, numbers in _TOKENS:
        if re.search(pattern, str(name).lower()):
            return next((number + extra for number in numbers if number + extra in known), None)
    return None


def vocabulary_rule(
    written: str,
    sizes: tuple[str, ...],
    types: tuple[str, ...],
    names: tuple[str, ...],
    added: tuple[str, ...] = (),
) -> Rule:
    """The rule for a model's vocabulary: its stated size, else the size of the tokenizer's type or
    name.

    Args:
        written: the key of the size that is written.
        sizes: keys of the size, those first that count more.
        types: keys of the tokenizer's type.
        names: keys of its name, path or files.
        added: keys of the number of tokens that are added to the tokenizer's.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        # A stated size wins, since padding may have rounded it up; a type says one vocabulary,
        # unless its file has another; a name says only a family.
        for key in sizes:
            if key in settings:
                return {"model.vocab": WHOLE.read(settings[key])}
        added_tokens = sum(WHOLE_OR_NONE.read(settings[key]) for key in added if key in settings)
        # One tokenizer serves models with embeddings of several sizes, between which the rows
        # beyond it decide.
        for key in types if EXTRA in settings else ():
            size = padded_vocabulary(settings.get(key), WHOLE_OR_NONE.read(settings[EXTRA]))
            if size is not None:
                return {"model.vocab": size}
        for key in types:
            size = vocabulary_of_type(settings.get(key))
            if size is not None:
                return _of_loaded_file(size, settings[key], settings, names, added_tokens)
        # Forks call types after families too (`QwenTokenizerFS`, `DeepSeekV3Tokenizer`); a name or
        # path says more.
        for key in (*names, *types):
            size = vocabulary_of(settings.get(key))
            if size is not None:
                return {
                    "model.vocab": size + added_tokens,
                    "note.vocabulary": f"a vocabulary of {size:,}, as the tokenizer {settings[key]} has",
                }
        return {}

    return Rule(
        keys=(*sizes, *types, *names, *added, EXTRA),
        read=read,
        write=lambda fields: {written: fields.get("model.vocab")},
        defaults={"model.vocab": GPT2},
        optional=(*types, *names),
        fields=("model.vocab",),
    )


_COMMON_FILES: Final = re.compile(
    r"(tokenizer|spiece|sentencepiece|bpe|vocab|encoder|merge|model|checkpoint|data|path|to)s?(\.\w+)?"
    r"|\$\{?\w+\}?"
)
"""Names of files and folders that say nothing about a tokenizer's vocabulary."""


def _of_loaded_file(
    size: int, kind: Any, settings: Mapping[str, Any], names: tuple[str, ...], added_tokens: int
) -> Fields:
    """Vocabulary of a type of tokenizers that loads any file of its notation: of the file where its
    name is known, else the usual one of the type.

    Args:
        size: usual vocabulary of the type.
        kind: name of the type.
        settings: values of the rule's keys.
        names: keys of names, paths or files.
        added_tokens: tokens beyond those of the tokenizer.
    """
    # A word behind the value, such as a variable with further arguments, is none of it.
    stated = [as_list(settings[key]) for key in names if settings.get(key)]
    files = [str(words[0]) for words in stated]
    for file in files:
        size_of_file = vocabulary_of(file)
        if size_of_file is not None:
            fields: Fields = {"model.vocab": size_of_file + added_tokens}
            if size_of_file != size:
                note = f"a vocabulary of {size_of_file:,}, as the tokenizer {file} has"
                fields["note.vocabulary"] = note
            return fields
    fields = {"model.vocab": size + added_tokens}
    # Folders of one model or one team hold its own tokenizer; such a name is not that of the type.
    telling = [file for file in files if any(map(_is_telling, re.split(r"[/\\]", file)[-2:]))]
    if telling:
        fields["note.vocabulary"] = (
            f"a vocabulary of {size:,}, as {kind} usually has (that of {telling[0]} is not known; "
            "--model sets another)"
        )
    return fields


def _is_telling(part: str) -> bool:
    """Whether a part of a path may name a tokenizer with its own vocabulary."""
    return bool(part) and part not in (".", "..") and _COMMON_FILES.fullmatch(part.lower()) is None


def vocabulary_of_type(name: Any) -> int | None:
    """Vocabulary size of a tokenizer type that exists in one size only."""
    return TYPES.get(str(name).lower())


def vocabulary_of(name: Any) -> int | None:
    """Vocabulary size of a tokenizer by name, path or hub id; None if the family is not
    recognised."""
    if not isinstance(name, str):
        return None
    # The folder says more than the file: `/models/Llama-3-8B/tokenizer.model`.
    parts = [part for part in re.split(r"[/\\]", name.lower().replace("_", "-")) if part]
    for part in reversed(parts):
        for pattern, size in _FAMILIES:
            if re.search(pattern, part):
                return size
    return None
