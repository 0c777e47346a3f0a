"""Models by name, from a Hugging Face `config.json`, or from a TOML file; convolutional networks
are written out."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from perfmodel.catalog import huggingface
from perfmodel.catalog._conv_nets import conv_nets
from perfmodel.catalog.entries import (
    checked,
    index,
    key,
    package_tables,
    parsed,
    read_toml,
    resolve,
)
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.files import parse_json
from perfmodel.spec import ConvNet, Mlp, Model, Transformer, key_fields
from perfmodel.spec.unet import UNet

Config = Mapping[str, Any]
ENCODERS_LEFT_OUT: Final = (
    "the encoders of images and texts are left out, whose results are usually computed before"
)
"""What is said of a U-Net, whose configuration describes it alone."""
LONGEST_ASSUMED: Final = 8192
"""Longest sequence assumed if a configuration states only its largest number of positions: models
are pre-trained on shorter ones (Llama 3 on 8,192 of 131,072, arXiv 2407.21783, section 3.4)."""


def model(name_or_path: str | Path | Model) -> Model:
    """Look up a model by catalog name, alias or Hugging Face id, or read it from a `.toml` file or
    a Hugging Face `config.json` (or the folder that holds it). A `Model` is returned as it is.

    A TOML file has a `name`, a `kind` (`transformer`, the default, `mlp`, `convnet` or `unet`) and
    the fields of `perfmodel.spec.Transformer`, `Mlp`, `ConvNet` or `UNet`.

    Raises:
        UnknownNameError: for a name that is neither in the catalog nor a file.
        PerfModelError: for a file with missing, unknown or malformed keys; lists all of them.
    """
    if isinstance(name_or_path, Model):
        return name_or_path
    # From the surest form to the loosest: a file by its ending, a folder by its config.json, else a
    # name.
    path = Path(name_or_path)
    if path.suffix == ".json":
        return read_config(path)
    if (path / "config.json").is_file():
        return read_config(path / "config.json")
    if path.suffix == ".toml":
        data = read_toml(path)
        return model_from_toml({"name": path.stem} | data, str(path))
    table, names = _catalog()
    name = str(name_or_path)
    if "/" in name:
        # An id of Hugging Face, such as meta-llama/Llama-3.1-70B-Instruct.
        known = [candidate for candidate in hub_names(name) if key(candidate) in names]
        name = known[0] if known else name
    if key(name) not in names and path.is_dir():
        raise PerfModelError(
            f"{path}: is a folder without config.json; give a config.json or a .toml file"
        )
    if key(name) not in names and path.is_file():
        raise PerfModelError(
            f"{path}: not a model; give a config.json or a .toml file, or a launch script with --from"
        )
    if "/" in name and key(name) not in names:
        # Names that only look alike are other models: the id's own configuration is the answer.
        raise UnknownNameError(
            "model",
            name,
            table,
            "if it is another model, download its config.json and give that file",
        )
    return resolve("model", name, names, table)()


_VARIANT: Final = re.compile(
    r"-(hf|base|instruct|chat|sft|it|pt|thinking|fp16|bf16|fp8|bnb|awq|gptq|int[48]|nf4|w\d+a\d+|[48]-?bits?|v\d+(\.\d+)*|2[0-9]{3})$"
)
"""Endings of names on a hub that describe fine-tuning, which does not change the architecture."""


_IN_CACHE: Final = re.compile(r"(?:^|/)models--(?P<id>[^/]+)(?:/snapshots(?:/\w+)?)?/?$")
"""A folder of Hugging Face's cache, whose name has two dashes for the slash of the id
(huggingface_hub file_download.py `repo_folder_name`)."""


def hub_names(name: str) -> tuple[str, ...]:
    """Possible catalog names for a model's name on a hub or in a framework, likeliest first."""
    cached = _IN_CACHE.search(name)
    if cached:
        name = cached["id"].replace("--", "/")
    # An id has its owner in front, and at its end how the model was trained on.
    tries = [name.rstrip("/").rpartition("/")[2].lower().replace("_", "-").removeprefix("meta-")]
    # `mistral-7b-instruct-v0.3` is tried without its version, then without the word before it.
    shorter = _VARIANT.sub("", tries[-1])
    while shorter != tries[-1]:
        tries.append(shorter)
        shorter = _VARIANT.sub("", tries[-1])
    return (*tries, tries[-1].replace("llama-", "llama"))


def every_model() -> Iterator[Model]:
    """Iterate over the models of the catalog, whatever files and folders have the same names."""
    table, _ = _catalog()
    for name in sorted(table):
        yield table[name]()


def models() -> tuple[str, ...]:
    """Names of all models in the catalog."""
    return tuple(sorted(_catalog()[0]))


def model_from_toml(data: dict[str, Any], place: str) -> Model:
    """A model from a parsed TOML table.

    Raises:
        PerfModelError: naming `place` and every key that is missing, unknown or malformed.
    """
    data = dict(data)
    kind = data.pop("kind", "transformer")
    match kind:
        case "transformer":
            # Fill in values that the file leaves out, by the rules of Megatron-Core's arguments and
            # Hugging Face's classes: all heads have keys, heads split the hidden size, 4x inner
            # size.
            hidden = data.get("hidden")
            heads = data.get("heads")
            if isinstance(heads, int):
                data.setdefault("kv_heads", heads)
            if isinstance(hidden, int):
                data.setdefault("ffn_hidden", 4 * hidden)
                if isinstance(heads, int) and heads > 0:
                    data.setdefault("head_dim", hidden // heads)
            return checked(Transformer, data, place)
        case "mlp":
            return checked(Mlp, data, place)
        case "convnet":
            return checked(ConvNet, data, place)
        case "unet":
            return checked(UNet, data, place)
    raise PerfModelError(f"{place}: kind: must be transformer, mlp, convnet or unet, got {kind!r}")


def model_with(base: Model, changes: Mapping[str, Any], place: str) -> Model:
    """Change fields of a model by name; in tables such as `experts`, other fields are kept.

    Raises:
        PerfModelError: naming `place` and every key that is unknown or malformed.
    """
    # Through the same checks as a file: a changed model is written out as a table, and read.
    kinds = {Transformer: "transformer", Mlp: "mlp", ConvNet: "convnet", UNet: "unet"}
    data = _changed(_as_table(base), changes)
    return model_from_toml({**data, "kind": kinds[type(base)]}, place)


def _as_table(model: Model) -> dict[str, Any]:
    """A model's fields in the form of a file: keys of sections at the top level, other records as
    tables."""
    tables = asdict(model)
    return {
        key: reduce(getitem, entry.path, tables) for key, entry in key_fields(type(model)).items()
    }


def _changed(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with some values changed."""
    changed = dict(data)
    for name, value in changes.items():
        inner = changed.get(name)
        changed[name] = _changed(inner or {}, value) if isinstance(value, Mapping) else value
    return changed


@cache
def _catalog() -> tuple[MappingProxyType[str, Callable[[], Model]], MappingProxyType[str, str]]:
    """Return the maker of each model of the catalog, and the model that each name and alias stands
    for.

    A model is made, and checked, when it is asked for: a process needs one of some two hundred.
    """
    table: dict[str, Callable[[], Model]] = {}
    aliases: dict[str, Sequence[str]] = {}
    # A file states once what all of its models share.
    for file, content in package_tables("models").items():
        defaults = content.get("defaults", {})
        for name, entry in content["models"].items():
            stated = defaults | {"name": name} | entry
            read = _model_of_config if "config" in stated else model_from_toml
            table[name] = cache(partial(read, stated, f"{file} [{name}]"))
            aliases[name] = stated.get("aliases", ())

    for name, network in conv_nets().items():
        table[name] = cache(network.make)
        aliases[name] = network.aliases
    return MappingProxyType(table), MappingProxyType(index(aliases.items()))


def _model_of_config(entry: Mapping[str, Any], place: str) -> Transformer:
    """The model of an entry that holds a Hugging Face configuration."""
    read = from_config(entry["config"], place=place)
    return replace(
        read, name=entry["name"], source=entry["source"], aliases=tuple(entry.get("aliases", ()))
    )


def read_config(path: Path) -> Transformer | UNet:
    """Read the model described by a `config.json`, using its `model_type`, or the `_class_name` of
    diffusers.

    Raises:
        PerfModelError: if the file is not JSON, or keys that the family needs are missing or
            malformed; lists all.
        UnknownNameError: for a `model_type` of none of the supported families, with a TOML file to
            complete.
    """
    config = parsed(path, parse_json, "JSON")
    if not isinstance(config, dict):
        raise PerfModelError(f"{path}: must hold one JSON object")
    if config.get("_class_name") == huggingface.UNetConfig.CLASS_NAME:
        return _unet_from_config(config, str(path))
    return from_config(config, place=str(path))


def _unet_from_config(config: Config, place: str) -> UNet:
    """The U-Net that a configuration of diffusers describes; see `read_config`."""
    # Nulls stand for the defaults of the class.
    stated = {key: value for key, value in config.items() if value is not None}
    family = huggingface.UNetConfig.CLASS_NAME
    read = checked(huggingface.UNetConfig, stated, f"{place}, _class_name {family!r}")
    name = config.get("_name_or_path")
    try:
        return UNet(
            name=name if isinstance(name, str) and name else f"{family}-{place}",
            source=f"configuration of diffusers {place}",
            left_out=ENCODERS_LEFT_OUT,
            **read.fields(),
        )
    except PerfModelError as error:
        raise PerfModelError(f"{place}: {error}") from None


def from_config(config: Config, *, place: str = "config.json") -> Transformer:
    """The model that a parsed configuration describes; see `read_config`.

    Of a model of several parts (a language model that sees or hears) the language model is read;
    `left_out` says what is not.
    """
    try:
        return _language_model(config, place)
    except PerfModelError as error:
        # Some errors describe the model already.
        if getattr(error, "__notes__", None):
            raise
        raise huggingface.with_toml(error, config) from None


def _language_model(config: Config, place: str) -> Transformer:
    """The model that a parsed configuration describes."""
    # The reader of a family is a dataclass of its keys: stated keys replace the class's defaults,
    # which equal those of Hugging Face's own class.
    whole_config = config
    config, family, left_out = huggingface.language_model(config, place)
    name = config.get("_name_or_path")
    relative = huggingface.RELATIVES.get(family, huggingface.Relative(family=family))
    if relative.family not in huggingface.FAMILIES:
        raise huggingface.unknown_model_type(
            family, {*huggingface.FAMILIES, *huggingface.RELATIVES}, config
        )
    reader = huggingface.FAMILIES[relative.family]
    is_part = config is not whole_config
    config = huggingface.with_class_defaults(config, family, is_part=is_part)
    aliases = {**getattr(reader, "ALIASES", {}), **relative.aliases}
    nulls_read = getattr(reader, "NULLS_READ", frozenset())
    stated = {**relative.defaults, **_stated(config, aliases, nulls_read)}
    family_place = f"{place}, model_type {family!r}"
    read = checked(reader, stated, family_place)
    read_keys = {*vars(read), *aliases}
    try:
        fields = {**read.fields(), **relative.fields}
        # Lists with an entry per layer have the same keys in all families; LFM2 alone gives other
        # words in them.
        if not getattr(reader, "READS_LAYER_TYPES", False):
            fields = huggingface.listed_layers(config, fields, family_place)
        fields |= _stated_tying(config, whole_config, fields)
        huggingface.check_parts_are_of_family(config, vars(read).keys(), fields)
        return Transformer(
            name=name if isinstance(name, str) and name else f"{family}-{place}",
            source=f"Hugging Face configuration {place}",
            left_out="; ".join(
                filter(
                    None,
                    (
                        *left_out,
                        relative.left_out,
                        getattr(read, "left_out", ""),
                        huggingface.further_modules(config, fields),
                        huggingface.head_of_class(config, fields),
                        huggingface.biases_not_counted(config, read_keys, fields),
                    ),
                )
            ),
            **_with_assumed_length(fields),
        )
    except huggingface.CannotDescribeError as error:
        raise huggingface.cannot_describe(family, str(error), config) from None
    except PerfModelError as error:
        raise PerfModelError(f"{place}: {error}") from None


def _stated(
    config: Config, aliases: Mapping[str, str], nulls_read: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The configuration without nulls, with keys renamed to those of the family's reader.

    Args:
        config: the configuration.
        aliases: names of keys, with the reader's names of them.
        nulls_read: keys whose nulls mean something else than their absence.
    """
    stated = {
        key: huggingface.one_number(value)
        for key, value in config.items()
        # Classes that derive a size where it is "auto" do so where it is absent too.
        if value != "auto" and (value is not None or aliases.get(key, key) in nulls_read)
    }
    if isinstance(stated.get("attn_config"), dict):
        stated["attn_config"] = _stated(stated["attn_config"], {})
    # Where a configuration has both names of a number, that which the reader knows wins.
    renamed = {aliases[key]: value for key, value in stated.items() if key in aliases}
    # A name with another meaning in this family (MiniMax-M3's `intermediate_size` is that of an
    # expert) is removed once it has been read under that meaning.
    return renamed | {key: value for key, value in stated.items() if key not in aliases}


def _stated_tying(
    config: Config, whole_config: Config, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Whether the head shares the token embedding, if the language model's or the whole
    configuration states it."""
    # Every class of Hugging Face with a head over tokens obeys this key; readers of families set
    # only the default. Classes of images are not tokens.
    if fields.get("patches"):
        return {}
    for part in (config, whole_config):
        tied = part.get("tie_word_embeddings")
        if isinstance(tied, bool):
            return {"tied_embeddings": tied}
    return {}


def _with_assumed_length(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a model, with a sequence that is no longer than models are usually trained on."""
    # Positions are the longest sequence that a model can read, not the length that it was trained
    # on: both are kept.
    # That of images or videos is the number of their patches.
    longest = fields["seq_len"]
    if longest <= LONGEST_ASSUMED or fields.get("patches"):
        return fields
    return fields | {"seq_len": LONGEST_ASSUMED, "longest_seq_len": longest}
