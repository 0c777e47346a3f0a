"""A published row -> model, cluster, job and layout, or the reason why it cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.schedule import schedule_names
from perfmodel.spec import Cluster, Job, Layout, Model, Transformer
from perfmodel.validation._conventions import conventions, job_of
from perfmodel.validation._memory_facts import memory_facts, partition_by_cost
from perfmodel.workload import parameter_count

Row = Mapping[str, Any]
"""Cells of one row; empty ones are None."""


class Unusable(PerfModelError):
    """A row that states too little, or runs something that is not modelled."""


@dataclass(frozen=True)
class Case:
    """One published run, ready to predict."""

    case_id: str
    model: Model
    cluster: Cluster
    job: Job
    layout: Layout


_DTYPES = {"mxfp8": "fp8", "fp8-mx": "fp8", "fp8-cs": "fp8"}
_SCHEDULES = {
    "none": "1f1b", "": "1f1b", "1f1b": "1f1b", "interleaved-1f1b": "interleaved", "1f1b-i": "interleaved",
    "gpipe": "gpipe", "dapple": "1f1b",
    # the authors search an order within a memory limit; these are their hand-made ones of the same memory
    "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zbv": "zb-v",
}  # fmt: skip
_FAMILY = {
    "gpt": {},
    "bert": {"causal": False, "token_types": 2, "pooler_and_mlm_head": True},
    "llama": {
        "gated_ffn": True, "activation": "silu", "norm": "rms_norm", "positions": "rope",
        "tied_embeddings": False, "bias": False, "dropout": False,
    },
}  # fmt: skip


def read_case(row: Row) -> Case:
    """Build the case of one row.

    Raises:
        Unusable: naming the cell that is missing or the feature that is not modelled.
        PerfModelError: where catalog or specs refuse what the row states.
    """
    source = _text(row, "source")
    model = _model(row)
    layout = _layout(row, source)
    if memory_facts(source).balanced_by_cost:
        layout = layout.replace(partition=partition_by_cost(model, layout.pp))
    n_devices = _count(row, "n_devices", layout.devices)
    if layout.devices != n_devices:
        raise Unusable("degrees do not multiply to the devices")
    dtype = _text(row, "dtype", "bf16")
    dtype = _DTYPES.get(dtype, dtype)
    if dtype not in ("bf16", "fp16", "fp32", "fp8", "tf32"):
        raise Unusable(f"dtype {dtype} is not modelled")
    flash = row.get("flash_attention")
    seq_len = _count(row, "seq_len", conventions(source).seq_len or model.seq_len)
    job = job_of(
        source,
        global_batch=_global_batch(row, layout),
        seq_len=seq_len,
        dtype=dtype,
        flash_attention=None if flash is None else bool(float(flash)),
        frozen="LoRA" in _text(row, "notes"),
    )
    cluster = catalog.cluster_for(
        _text(row, "device"),
        _count(row, "devices_per_node", 8),
        _text(row, "intra_link"),
        _text(row, "inter_link"),
    )
    return Case(_text(row, "case_id"), model, cluster, job, _selected_layers(layout, model, row, source))


def _selected_layers(layout: Layout, model: Model, row: Row, source: str) -> Layout:
    """Selective recompute of whole layers: a share f of them makes HFU / MFU = 1 + f / 3, a forward being a third."""
    hardware, useful = row.get("measured_hfu"), row.get("measured_mfu")
    if not conventions(source).selective_layers or layout.recompute != "selective" or layout.pp > 1:
        return layout
    if hardware is None or useful is None or not isinstance(model, Transformer):
        return layout
    repeated = round(min(1.0, max(0.0, 3 * (float(hardware) / float(useful) - 1))) * model.layers)
    return layout.replace(recompute="none", recompute_full_layers=(repeated,))


def _layout(row: Row, source: str) -> Layout:
    usual = conventions(source)
    name = _text(row, "schedule").lower()
    if name not in _SCHEDULES and name not in schedule_names():
        raise Unusable(f"schedule {name} is not modelled")
    vpp = _count(row, "vpp", 1)
    recompute = _text(row, "recompute") or usual.recompute
    kind = next((k for k in ("full", "selective") if recompute.startswith(k)), "none")
    zero = row.get("zero_stage")
    sequence = row.get("sequence_parallel")
    stage = usual.zero if zero is None else int(float(zero))
    overlaps = usual.zero_overlaps or stage == 0
    pp = _count(row, "pp")
    return Layout(
        tp=_count(row, "tp"),
        pp=pp,
        dp=_count(row, "dp"),
        cp=_count(row, "cp", 1),
        ep=_count(row, "ep", 1),
        vpp=vpp if pp > 1 else 1,
        micro_batch=_count(row, "micro_batch"),
        schedule="interleaved" if vpp > 1 and pp > 1 else _SCHEDULES.get(name, name).replace("interleaved", "1f1b"),
        zero=stage,
        recompute=kind,  # pyright: ignore[reportArgumentType]
        sequence_parallel=usual.sequence_parallel if sequence is None else bool(float(sequence)),
        overlap_grad_reduce=usual.overlap_grad_reduce and overlaps,
        overlap_param_gather=usual.overlap_param_gather and overlaps,
    )


def _global_batch(row: Row, layout: Layout) -> int:
    """Whole micro-batches per replica; a smaller last micro-batch is rounded up, as it runs as one."""
    stated = _count(row, "global_batch")
    per_step = layout.dp * layout.micro_batch
    return -(-stated // per_step) * per_step


def _model(row: Row) -> Model:
    """The catalog's model where it has the row's name and shape, else one built from the row."""
    name, family = _text(row, "model"), _text(row, "family", "gpt")
    named = catalog.model(name) if _known(name) else None
    known = [row.get(name) is not None for name in ("heads", "layers", "params_b")]
    stated = row.get("hidden") is not None and any(known)
    if named is not None and (not stated or _same_shape(named, row)):
        return _shorter_decoder(named, row)
    if not stated:
        raise Unusable("model shape is not stated and the name is not in the catalog")
    if family not in _FAMILY:
        return _by_name_with_layers(name, row)
    hidden = _count(row, "hidden")
    source = _text(row, "source")
    heads = _count(row, "heads", conventions(source).heads or _usual_heads(hidden, _count(row, "tp", 1)))
    model = Transformer(
        name=name,
        layers=_layers(row, hidden),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(row, "kv_heads", heads),
        head_dim=hidden // heads,
        ffn_hidden=_count(row, "ffn_hidden", 4 * hidden),
        vocab=_count(row, "vocab", conventions(source).vocab),
        seq_len=_count(row, "seq_len", 2048),
        source=source,
        **_FAMILY[family],
    )
    return _tied_or_not(model, row)


def _shorter_decoder(model: Model, row: Row) -> Model:
    tokens = conventions(_text(row, "source")).decoder_seq_len
    if isinstance(model, Transformer) and model.decoder_layers and tokens:
        return replace(model, decoder_seq_len=tokens)
    return model


def _same_shape(model: Model, row: Row) -> bool:
    if not isinstance(model, Transformer):
        return True
    stated = {name: row.get(name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")}
    layers = model.layers + model.decoder_layers
    return all(
        value is None or float(value) == (getattr(model, name) if name != "layers" else layers)
        for name, value in stated.items()
    )


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads that divide the hidden size and tp, nearest to the usual 128 per head."""
    fitting = [h for h in range(tp, hidden + 1, tp) if hidden % h == 0]
    return min(fitting, key=lambda h: abs(hidden / h - 128), default=max(1, hidden // 128))


def _tied_or_not(model: Transformer, row: Row) -> Transformer:
    """Tied or separate embeddings: whichever comes nearer to the stated parameter count."""
    stated = row.get("params_b")
    if stated is None:
        return model
    other = replace(model, tied_embeddings=not model.tied_embeddings)
    return min((model, other), key=lambda m: abs(parameter_count(m) - float(stated) * 1e9))


def _by_name_with_layers(name: str, row: Row) -> Model:
    """A catalog model, cut to the row's layer count where it states one."""
    base = next((n for n in (name, name.split("-cut")[0], name.split("-L")[0]) if _known(n)), None)
    if base is None:
        raise Unusable(f"family {_text(row, 'family')} without a catalog entry")
    model = catalog.model(base)
    layers = row.get("layers")
    if isinstance(model, Transformer) and layers is not None and int(float(layers)) != model.layers:
        experts = model.experts
        if experts is not None and experts.first_dense_layers >= int(float(layers)):
            experts = replace(experts, first_dense_layers=0)
        model = replace(model, layers=int(float(layers)), experts=experts)
    return model


def _known(name: str) -> bool:
    try:
        catalog.model(name)
    except PerfModelError:
        return False
    return True


def _layers(row: Row, hidden: int) -> int:
    """Stated layers, or those that the parameter count leaves, as a multiple of the pipeline depth."""
    if row.get("layers") is not None:
        return _count(row, "layers")
    if row.get("params_b") is None:
        raise Unusable("layers are not stated")
    pp = _count(row, "pp", 1)
    vocab = _count(row, "vocab", conventions(_text(row, "source")).vocab)
    layers = (float(row["params_b"]) * 1e9 - vocab * hidden) / (12 * hidden**2)
    return max(1, round(layers / pp)) * pp


def _text(row: Row, name: str, default: str = "") -> str:
    value = row.get(name)
    return default if value is None else str(value).strip()


def _count(row: Row, name: str, default: int | None = None) -> int:
    value = row.get(name)
    if value is None:
        if default is None:
            raise Unusable(f"{name} is not stated")
        return default
    try:
        number = float(value)
    except ValueError:
        raise Unusable(f"{name} is not a number") from None
    if number < 1 or number != int(number):
        raise Unusable(f"{name} is not a whole number above zero")
    return int(number)
