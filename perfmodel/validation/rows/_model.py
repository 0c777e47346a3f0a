"""The model of a row of published runs: from its columns, completed by its name."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.spec import Framework, Job, Model, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.validation.rows._cells import Row, Unusable, count, number, text
from perfmodel.validation.rows._keys import key_tables, states_whole_model
from perfmodel.validation.rows._words import seq_len_of, vocab_of
from perfmodel.workload import parameter_count, step_flops

_LLAMA: Final[dict[str, Any]] = {
    "gated_ffn": True,
    "activation": "silu",
    "norm": "rms_norm",
    "positions": "rope",
    "tied_embeddings": False,
    "bias": False,
    "dropout": False,
}
_FAMILY: Final[dict[str, dict[str, Any]]] = {
    "gpt": {},
    "bert": {"causal": False, "token_types": 2, "pooler_and_mlm_head": True},
    "llama": _LLAMA,
    "moe": _LLAMA,
    "nemotron": {
        "positions": "rope",
        "tied_embeddings": False,
        "bias": False,
        "activation": "relu2",
    },
}
"""Fields of a model by the first word of a row's family; further words are descriptions."""
_SIZES: Final = ("layers", "hidden", "heads", "kv_heads", "vocab")
MOST_HEADS: Final = 4096


@dataclass(frozen=True)
class RowModel:
    """A row's model, and the names of assumed facts."""

    model: Model
    assumed: tuple[str, ...] = ()


def model_of(row: Row, framework: Framework) -> RowModel:
    """The model of a row; `model.*` columns define it or change the model of the plain columns.

    Args:
        framework: pads a vocabulary that the row does not state as it ran.

    Raises:
        Unusable: the row states too little, or another kind of network.
        PerfModelError: a key that no model has, or a value that it cannot have.
    """
    keys = key_tables(row).get("model", {})
    columns_name = f"run {text(row, 'case_id')}: model.*"
    if states_whole_model(keys):
        return RowModel(
            catalog.model_from_toml({"name": text(row, "model") or "unnamed"} | keys, columns_name)
        )
    described = _described_model(row, framework)
    if not keys:
        return described
    return replace(described, model=catalog.model_with(described.model, keys, columns_name))


def _described_model(row: Row, framework: Framework) -> RowModel:
    """The model that a row's plain columns describe.

    It is the catalog's if that has the row's name and shape; one cut or widened to the row's shape
    if the name stands for experts or latent attention, whose sizes rows seldom state; else one
    built from the row.

    Args:
        framework: pads a vocabulary that the row does not state as it ran.

    Raises:
        Unusable: the row states too little, or another kind of network.
    """
    # A name of the catalog counts only where every size that the row states agrees with it.
    name = text(row, "model")
    family = _family(row)
    named = known_model(name)
    states_depth = any(
        number(row, column) is not None for column in ("heads", "layers", "params_b")
    )
    stated = states_depth and number(row, "hidden") is not None
    if named is not None and _same_shape(named, row):
        return RowModel(_further_tokens(named, row))
    if named is None and not stated and number(row, "layers") is None:
        shapes = open_shapes(row)
        if not shapes:
            raise Unusable("model shape is not stated and the name is not in the catalog")
        # The likeliest shape; the others take part in the mixture of all that the run may be.
        cells, _ = max(shapes, key=lambda shape: shape[1])
        completed = _built({**row, **cells}, cells["family"], framework)
        return replace(completed, assumed=("shape", *completed.assumed))
    relative = _catalog_model_of_shape(family, row)
    if relative is not None:
        return RowModel(relative)

    # The name of a cut model begins with the whole one's, before `cut`, a number of layers (`-L4`)
    # or a space.
    base = named
    for separator in (r"[- ]cut\b", r"-L\d", r" "):
        base = base or known_model(re.split(separator, name)[0])
    if isinstance(base, Transformer):
        # Rows seldom state the sizes of experts or latent attention.
        has_further_sizes = base.experts is not None or base.latent_attention is not None
        if has_further_sizes or family not in _FAMILY or not stated:
            return _reshaped(base, row)
    if not stated:
        raise Unusable("model shape is not stated and the name is not in the catalog")
    if family in _FAMILY:
        return _built(row, family, framework)

    # Layers that publications call by what they do, else those of the family's nearest model.
    if family in _PLAIN_STACKS:
        built = _built(row, _PLAIN_STACKS[family], framework)
    else:
        built = _like_relative(_OTHER_WORDS.get(family, family), row)
    return replace(built, assumed=("architecture", *built.assumed))


_SMALL_MODEL_B: Final = 5.0
_WIDTHS_PER_LAYER: Final = ((64, 0.25), (128, 0.5), (192, 0.25))
"""Hidden sizes per layer of models of which only the parameters are known, each with its
probability: that of most published models, and half as much and more (GPT-3, arXiv 2005.14165,
table 2.1: 128 from 6.7 billion parameters on; Llama 3, arXiv 2407.21783, table 3: 102 to 130;
Nemotron-4 340B, arXiv 2406.11704: 192)."""
_WIDTHS_PER_LAYER_OF_SMALL: Final = ((43, 0.25), (64, 0.5), (128, 0.25))
"""The same below `_SMALL_MODEL_B` billion parameters (GPT-3's table: 43 to 85)."""
_SHAPE_CELLS: Final = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")
_SIZE: Final = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?) ?([mbt])(?![a-z0-9])", re.IGNORECASE)
_BILLIONS: Final = {"m": 1e-3, "b": 1.0, "t": 1e3}
_PLAIN_STACKS: Final = {
    "dense": "llama",
    "decoder": "llama",
    "transformer": "gpt",
    "encoder": "bert",
}
"""Families whose layers are like those of another, by their names in tables."""
_OTHER_WORDS: Final = {
    "encoder-decoder": "t5",
    "seq2seq": "t5",
    "vision": "vit",
    "cohere": "command",
}
"""Families whose models have another word in their names."""


def _stated_billions(row: Row) -> float | None:
    """Parameters in billions, by their column, else by the only size in the model's name."""
    params_b = number(row, "params_b")
    if params_b is not None:
        return params_b
    sizes = _SIZE.findall(text(row, "model"))
    if len(sizes) != 1:
        return None
    figure, unit = sizes[0]
    return float(figure) * _BILLIONS[unit.lower()]


def open_shapes(row: Row) -> list[tuple[dict[str, Any], float]]:
    """Possible shapes, with probabilities, of a dense stack of known family and parameters.

    Empty if the row states a size of its layers, its name is in the catalog, or nothing says how
    large it is.
    """
    family = _PLAIN_STACKS.get(_family(row), _family(row))
    is_known = family in _FAMILY and family not in ("moe", "bert")
    billions = _stated_billions(row) if is_known else None
    states_sizes = any(number(row, name) is not None for name in _SHAPE_CELLS)
    if not billions or states_sizes or known_model(text(row, "model")) is not None:
        return []
    shapes = []
    widths = _WIDTHS_PER_LAYER_OF_SMALL if billions < _SMALL_MODEL_B else _WIDTHS_PER_LAYER
    for width_per_layer, probability in widths:
        # A layer has 12 h^2 parameters (`_layers`), and a stack of h / w of them 12 h^3 / w.
        multiple = math.lcm(128, count(row, "tp", 1))
        exact_hidden = (billions * 1e9 * width_per_layer / 12) ** (1 / 3)
        hidden = max(1, round(exact_hidden / multiple)) * multiple

        # Gated feed-forward blocks have three matrices for two, so that their inner size is two
        # thirds of 4 h.
        if _FAMILY[family].get("gated_ffn"):
            ffn = 8 * hidden // 3 // multiple * multiple
        else:
            ffn = 4 * hidden
        shapes.append(
            (
                {"family": family, "params_b": billions, "hidden": hidden, "ffn_hidden": ffn},
                probability,
            )
        )
    return shapes


def _family(row: Row) -> str:
    family_words = text(row, "family", "gpt").lower().split()
    return family_words[0] if family_words else "gpt"


_SIZE_AFTER_NAME: Final = re.compile(r"(.+)-(\d+(?:\.\d+)?)b", re.IGNORECASE)
_MOST_OFF_SIZE: Final = 0.05
"""Relative difference between the size that a name ends with and the parameters of the model."""


def known_model(name: str) -> Model | None:
    """The catalog's model of a name, which may end in billions of parameters; else None."""
    named = _of_catalog(name)
    if named is not None:
        return named

    # A size after the name may tell a variant of another size, so that it has to agree with the
    # model's parameters.
    parts = _SIZE_AFTER_NAME.fullmatch(name)
    model = _of_catalog(parts[1]) if parts else None
    if parts is None or not isinstance(model, Transformer):
        return None
    billions = parameter_count(model) / 1e9
    return model if abs(float(parts[2]) / billions - 1) <= _MOST_OFF_SIZE else None


def _of_catalog(name: str) -> Model | None:
    try:
        return catalog.model(name) if name else None
    except PerfModelError:
        return None


def _catalog_model_of_shape(family: str, row: Row) -> Model | None:
    """The catalog's model of a family and stated shape; None if rows describe it fully."""
    if family in _FAMILY:
        return None
    family_models = (
        catalog.model(name) for name in catalog.models() if name.startswith(f"{family}-")
    )
    return next((model for model in family_models if _same_shape(model, row)), None)


def _same_shape(model: Model, row: Row) -> bool:
    """Whether every size that the row states is the model's."""
    if not isinstance(model, Transformer):
        return True
    experts = model.experts
    model_sizes = {name: {getattr(model, name)} for name in _SIZES}
    # Sources count the layers of both stacks, or of each.
    model_sizes["layers"] |= {model.layers + model.decoder_layers}
    model_sizes["ffn_hidden"] = (
        {model.ffn_hidden, experts.ffn_hidden} if experts else {model.ffn_hidden}
    )
    if experts:
        model_sizes |= {"n_experts": {experts.count}, "top_k": {experts.topk}}
    else:
        model_sizes |= {"n_experts": {0, 1}}
    stated = {name: number(row, name) for name in model_sizes}
    return all(size is None or size in model_sizes[name] for name, size in stated.items())


def _like_relative(family: str, row: Row) -> RowModel:
    """A model of the catalog whose name begins with the family, in the row's sizes.

    Of several the one that has the parameters that the row states in its sizes, or, where it states
    none, whose hidden size is nearest; with experts only if the row states their number.

    Raises:
        Unusable: no model of the family can have the row's sizes.
    """
    has_experts = (number(row, "n_experts") or 1) > 1
    params_b = number(row, "params_b")
    hidden = count(row, "hidden")
    nearest: tuple[float, RowModel] | None = None
    for base in catalog.every_model():
        if not isinstance(base, Transformer) or (base.experts is not None) != has_experts:
            continue
        if not any(_is_of_family(name, family) for name in (base.name, *base.aliases)):
            continue
        try:
            reshaped = _reshaped(base, row)
        except PerfModelError:
            continue  # such as a pattern of layers for a number that it cannot fill
        if params_b is None:
            distance = abs(math.log(hidden / base.hidden))
        else:
            distance = abs(math.log(params_b * 1e9 / parameter_count(reshaped.model)))
        if nearest is None or distance < nearest[0]:
            nearest = distance, reshaped
    if nearest is None:
        raise Unusable(f"family {text(row, 'family')} without a catalog entry")
    return nearest[1]


def _is_of_family(name: str, family: str) -> bool:
    """Whether a model's name is the family's, with or without hyphens, before a version or size:
    `gpt-j-6b` is of `gptj`, and `vit-b-16` of `vit`, but `bart-base` not of `ba`."""
    rest = name.lower().replace("-", " ")
    for letter in family.replace("-", ""):
        rest = rest.removeprefix(" ")
        if not rest.startswith(letter):
            return False
        rest = rest.removeprefix(letter)
    return not rest[:1].isalpha()


def _reshaped(base: Transformer, row: Row) -> RowModel:
    """A catalog's model with the sizes that the row states."""
    sizes = {name: count(row, name) for name in _SIZES if number(row, name) is not None}
    # Sizes that follow from others in the catalog's model follow from them in the changed one.
    hidden = sizes.get("hidden", base.hidden)
    heads = sizes.get("heads", base.heads)
    if base.latent_attention is None and (hidden, heads) != (base.hidden, base.heads):
        sizes["head_dim"] = max(1, hidden // heads)
    if base.kv_heads == base.heads:
        sizes.setdefault("kv_heads", heads)
    # Both stacks of an encoder and decoder are mostly as deep as each other.
    if base.decoder_layers == base.layers:
        sizes["decoder_layers"] = sizes.get("layers", base.layers)
    ffn = count(row, "ffn_hidden", base.ffn_hidden)

    # Without experts only the feed-forward size is left to change.
    experts = base.experts
    if experts is None:
        return RowModel(replace(base, **sizes, ffn_hidden=ffn))

    # An inner size that is not the catalog's is that of the experts.
    inner = experts.ffn_hidden if ffn == base.ffn_hidden else ffn
    layers = sizes.get("layers", base.layers)
    dense, stated = _dense_layers(row, base, layers)
    experts = replace(
        experts,
        count=count(row, "n_experts", experts.count),
        topk=count(row, "top_k", experts.topk),
        ffn_hidden=inner,
        first_dense_layers=dense,
    )
    return RowModel(replace(base, **sizes, experts=experts), () if stated else ("dense layers",))


def _dense_layers(row: Row, base: Transformer, layers: int) -> tuple[int, bool]:
    """Number of leading layers without experts, and whether the row states it.

    A column of its own states them; all layers of the model have those of the catalog; a cut has
    their share of its layers, and at least one where there are any.
    """
    if number(row, "first_dense_layers") is not None:
        return min(layers, count(row, "first_dense_layers", least=0)), True
    dense = base.experts.first_dense_layers if base.experts else 0
    if layers >= base.layers or not dense:
        return min(layers, dense), True
    return min(layers - 1, max(1, round(dense * layers / base.layers))), False


def _built(row: Row, family: str, framework: Framework) -> RowModel:
    """A stack of the family's layers in the row's sizes."""
    hidden = count(row, "hidden")
    tp = count(row, "tp", 1)
    heads = count(row, "heads", _usual_heads(hidden, tp))
    # Frameworks pad the tokenizer's entries so that tensor-parallel ranks get as many each.
    vocab, unpadded = vocab_of(row)
    if unpadded:
        multiple = framework.launch.vocab_multiple * tp
        vocab = -(-vocab // multiple) * multiple
    ffn = count(row, "ffn_hidden", 4 * hidden)
    model = Transformer(
        name=text(row, "model") or "unnamed",
        layers=_layers(row, hidden, vocab),
        hidden=hidden,
        heads=heads,
        kv_heads=count(row, "kv_heads", heads),
        head_dim=count(row, "head_dim", hidden // heads),
        ffn_hidden=ffn,
        vocab=vocab,
        seq_len=count(row, "seq_len", 2048),
        experts=_experts(row, family, ffn),
        source=text(row, "source"),
        **_FAMILY[family],
    )
    assumed = []
    if number(row, "heads") is None:
        assumed.append("heads")
    if unpadded:
        assumed.append("vocab")
    return RowModel(_tied_or_not(model, row), tuple(assumed))


def _experts(row: Row, family: str, ffn: int) -> Experts | None:
    """Routed experts with the row's inner size, if it states their number."""
    n_experts = number(row, "n_experts")
    if n_experts is None or n_experts <= 1:
        if family == "moe":
            raise Unusable("family moe: n_experts is not stated and the name is not in the catalog")
        return None
    dense = number(row, "first_dense_layers")
    return Experts(
        count=count(row, "n_experts"),
        topk=count(row, "top_k"),
        ffn_hidden=ffn,
        first_dense_layers=0 if dense is None else count(row, "first_dense_layers", least=0),
    )


def _further_tokens(model: Model, row: Row) -> Model:
    """The model with modules for multi-token prediction (the catalog's of the name and `-mtp`) or
    without them, whichever is closer to the FLOPs per token implied by the row's two rates,
    counting only visible attention."""
    further = known_model(f"{model.name}-mtp")
    tflops = number(row, "measured_tflops_per_device")
    tokens_per_s = number(row, "measured_tokens_per_s_per_device")
    if further is None or tflops is None or tokens_per_s is None:
        return model
    # Both rates are of the same run, so their ratio is the FLOPs per token that its authors
    # counted.
    stated = tflops * 1e12 / tokens_per_s
    seq_len, _ = seq_len_of(row, model)
    job = Job(global_batch=1, seq_len=seq_len)
    chosen = min(
        (model, further),
        key=lambda candidate: abs(step_flops(candidate, job).total_causal / seq_len - stated),
    )
    return replace(chosen, name=model.name)


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads that divide the hidden size and tp, nearest to the usual 128 per head."""
    # Tensor parallelism has to divide the heads.
    fitting = [h for h in range(tp, min(hidden, MOST_HEADS) + 1, tp) if hidden % h == 0]
    return min(fitting, key=lambda h: abs(hidden / h - 128), default=max(1, hidden // 128))


def _tied_or_not(model: Transformer, row: Row) -> Transformer:
    """Tied or separate embeddings: whichever comes nearer to the stated parameter count."""
    stated = number(row, "params_b")
    if stated is None:
        return model
    untied_or_tied = replace(model, tied_embeddings=not model.head.tied_embeddings)
    return min(
        (model, untied_or_tied),
        key=lambda candidate: abs(parameter_count(candidate) - stated * 1e9),
    )


def _layers(row: Row, hidden: int, vocab: int) -> int:
    """Stated layers, or those of the parameter count, as a multiple of the pipeline depth."""
    if number(row, "layers") is not None:
        return count(row, "layers")
    params_b = number(row, "params_b")
    if params_b is None:
        raise Unusable("layers are not stated")
    pp = count(row, "pp", 1)
    # A layer has 4 h^2 parameters in attention and 8 h^2 in its feed-forward block.
    layers = (params_b * 1e9 - vocab * hidden) / (12 * hidden**2)
    return max(1, round(layers / pp)) * pp
