"""Blocks of models of every kind under every optional feature, kept in `known_blocks.csv`.

For each base: its parameters, the FLOPs of its step and the bytes of its cache; then every block's
kernels, collectives and bytes on one rank, as it is and with one field of the job, of the shard or
of the model changed. A change that is meant to move them is followed by

    PYTHONPATH=tests python tests/workload/known_blocks.py
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from models_of_parts import LATENT, MODELS_OF_PARTS, PLAIN
from optional_features import other_values
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.ops import KernelOp
from perfmodel.spec import Job, Layout, Model, Transformer
from perfmodel.spec.parts import (
    DeltaNet,
    Experts,
    Mamba,
    NarrowEmbedding,
    SelectiveScan,
    ShortConv,
    Spectrogram,
    WindowHeads,
)
from perfmodel.workload import (
    BlockOps,
    Comm,
    Shard,
    blocks,
    layer_cache_bytes,
    optimizer_op,
    orthogonalisation,
    parameters,
    step_flops,
)

TABLE = Path(__file__).with_suffix(".csv")
COMBINED = 8
"""Variants of each base with several changes at once."""
JOB = Job(global_batch=8, seq_len=1024)
LAYOUT = Layout(tp=2, sequence_parallel=True, micro_batch=2)
ADAPTERS = JOB.replace(frozen=True, adapter_rank=16)


@dataclass(frozen=True)
class Base:
    """A model on one rank, and which of its records are tried with every change of one field."""

    model: Model
    layout: Layout = LAYOUT
    job: Job = JOB
    varied: tuple[str, ...] = ()


def _base(
    name: str,
    layers: int = 0,
    *varied: str,
    layout: Layout = LAYOUT,
    job: Job = JOB,
    **changes: Any,
) -> Base:
    """A model of the catalog with so many of its layers (0: all) and with other fields."""
    model: Any = catalog.model(name)
    if layers:
        model = replace(model, layers=layers)
    return Base(model.replace(**changes) if changes else model, layout, job, varied)


def _streams(name: str, mixers: str) -> Model:
    """A model of text and image of the catalog with a layer for each letter."""
    model: Any = catalog.model(name)
    return model.replace(layers=len(mixers), mixers=mixers)


TINY: dict[str, Any] = {
    "hidden": 64,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "ffn_hidden": 80,
    "vocab": 320,
}
"""Sizes so small that one parameter or byte more shows in what is stored."""
FEW_TOKENS = Job(global_batch=4, seq_len=24)
SMALL_EXPERTS = Experts(
    count=8,
    topk=3,
    ffn_hidden=48,
    shared_ffn_hidden=32,
    shared_gate=True,
    router_bias=True,
    groups=4,
    groups_kept=2,
)
EVERY_MIXER = _base(
    "llama3-8b",
    9,
    **TINY,
    window=8,
    experts=SMALL_EXPERTS,
    mixers="*E M- S L C W- *- C- LE",
    mamba=Mamba(heads=16, head_dim=8, state=4, groups=2),
    selective_scan=SelectiveScan(inner=96, state=4, step_rank=5, inner_norms=True),
    delta_net=DeltaNet(
        heads=8, key_heads=4, head_dim=8, key_dim=6, channel_decays=True, gate_rank=3
    ),
    short_conv=ShortConv(kernel=3),
).model
BASES = {
    "llama3-8b": _base("llama3-8b", 4, "layout", "job"),
    "gpt3-1.3b": _base("gpt3-1.3b", 2, "job", layout=LAYOUT.replace(tp=4)),
    "mixtral-8x7b": _base("mixtral-8x7b", 2, "layout", "job", layout=LAYOUT.replace(dp=4, ep=4)),
    "deepseek-v3-mtp": _base(
        "deepseek-v3-mtp", 6, "layout", "job", layout=LAYOUT.replace(tp=4, dp=2, ep=8, etp=1)
    ),
    "gpt-oss-20b": _base("gpt-oss-20b", 4),
    "gemma-2-9b": _base("gemma-2-9b", 4),
    "command-r-35b": _base("command-r-35b", 2),
    "nemotron-h-8b": _base("nemotron-h-8b"),
    "qwen3-next-80b-a3b": _base("qwen3-next-80b-a3b"),
    "codestral-mamba-7b": _base("codestral-mamba-7b"),
    "t5-v1.1-base": _base("t5-v1.1-base", 0, "layout", "job", decoder_seq_len=200),
    "bert-large": _base("bert-large", 4),
    "vit-l-16": _base("vit-l-16", 4, "part"),
    "dit-l-2": _base("dit-l-2", 4, "part"),
    "wan2.1-1.3b": _base("wan2.1-1.3b", 2, "layout", "part", job=FEW_TOKENS),
    "sd3-medium": Base(
        _streams("sd3-medium", "DO"), Layout(micro_batch=2), FEW_TOKENS, varied=("layout",)
    ),
    "flux-dev": Base(_streams("flux-dev", "DNN"), job=FEW_TOKENS, varied=("layout", "part")),
    "flux-dev over ranks": Base(
        _streams("flux-dev", "DNN"), LAYOUT.replace(cp=2), JOB.replace(seq_len=4096)
    ),
    "adapters of streams": Base(_streams("flux-dev", "DNN"), job=ADAPTERS),
    "encoders in the step": Base(
        _streams("sd3-medium", "DO"),
        Layout(micro_batch=2),
        FEW_TOKENS.replace(cached_latents=False, cached_text=False),
    ),
    "encoders of a network": _base(
        "sd-1.5", layout=Layout(micro_batch=2), job=FEW_TOKENS.replace(cached_latents=False)
    ),
    "resnet-50": _base("resnet-50", layout=Layout(micro_batch=2)),
    "vgg-16": _base("vgg-16", layout=Layout(micro_batch=2)),
    "mlp-1b": _base("mlp-1b", layout=Layout(micro_batch=2)),
    "frozen convolutions": _base(
        "resnet-50", layout=Layout(micro_batch=2), job=JOB.replace(frozen=True)
    ),
    "llama-4-scout": _base("llama-4-scout", 4, job=JOB.replace(seq_len=20000)),
    "opt-350m": _base("opt-350m", 2),
    "siglip-b-16": _base("siglip-b-16", 2),
    "nemotron-3-super-mtp": _base(
        "nemotron-3-super-mtp", layout=LAYOUT.replace(dp=4, ep=4), mtp_layers=3
    ),
    "tiny": _base("llama3-8b", 2, "model", "job", job=FEW_TOKENS, **TINY),
    "tiny experts": _base(
        "mixtral-8x7b",
        2,
        "model",
        "part",
        layout=LAYOUT.replace(dp=8, ep=8),
        job=FEW_TOKENS,
        **TINY | {"experts": SMALL_EXPERTS},
    ),
    "every mixer": Base(EVERY_MIXER, job=FEW_TOKENS, varied=("layout", "job")),
    "every mixer on one rank": Base(
        EVERY_MIXER, Layout(micro_batch=2), FEW_TOKENS, varied=("model", "part")
    ),
    "encoder and decoder on one rank": _base(
        "t5-v1.1-base", 2, layout=Layout(micro_batch=2), job=FEW_TOKENS
    ),
    "tables on one rank": _base("gpt3-1.3b", 2, layout=Layout(micro_batch=2), job=FEW_TOKENS),
    "further tokens on one rank": _base(
        "deepseek-v3-mtp", 5, layout=Layout(micro_batch=2), job=FEW_TOKENS
    ),
    "experts as products": _base(
        "mixtral-8x7b",
        2,
        layout=LAYOUT.replace(dp=4, ep=4),
        job=JOB.replace(einsum_dispatch=True, expert_capacity_factor=1.25),
    ),
    "spectrogram": _base(
        "t5-v1.1-base", 0, "part", spectrogram=Spectrogram(channels=80), positions="learned"
    ),
    "narrow tables": _base(
        "bert-large",
        4,
        "part",
        narrow_embedding=NarrowEmbedding(width=128, all_tables=True, bias=True),
    ),
    "other heads in the window": _base(
        "gemma-2-9b",
        4,
        "part",
        window_heads=WindowHeads(
            heads=8, kv_heads=2, head_dim=128, value_dim=64, attention_sinks=True
        ),
    ),
    "long sequence": _base(
        "llama3-8b",
        2,
        "layout",
        "model",
        layout=LAYOUT.replace(cp=4),
        job=JOB.replace(seq_len=16384),
    ),
    "latent attention over ranks": _base(
        "deepseek-v2-lite", 3, "layout", layout=LAYOUT.replace(cp=2), job=JOB.replace(seq_len=16384)
    ),
    "window over ranks": _base(
        "gemma-2-9b",
        4,
        "layout",
        layout=LAYOUT.replace(cp=4, cp_kind="all_gather"),
        job=JOB.replace(seq_len=32768),
    ),
    "adapters": _base("llama3-8b", 2, "layout", "job", job=ADAPTERS),
    "adapters without dropout": _base(
        "llama3-8b",
        2,
        job=FEW_TOKENS.replace(
            frozen=True,
            adapter_rank=3,
            adapter_dropout=False,
            adapter_modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        ),
        **TINY,
    ),
    "adapters of experts": _base(
        "mixtral-8x7b", 2, layout=LAYOUT.replace(dp=4, ep=4), job=ADAPTERS
    ),
    "adapters of latent attention": _base("deepseek-v2-lite", 3, job=ADAPTERS),
    "adapters of encoder and decoder": _base("t5-v1.1-base", job=ADAPTERS, decoder_seq_len=200),
    "adapters of every mixer": Base(
        EVERY_MIXER, job=FEW_TOKENS.replace(frozen=True, adapter_rank=3)
    ),
    "adapters of 4-bit weights": _base("qwen2.5-3b", 4, job=ADAPTERS.replace(base_weights="nf4")),
    "fp8": _base("llama3-8b", 2, "job", job=JOB.replace(dtype="fp8", fp8_recipe="delayed")),
    "fp8 of experts": _base(
        "mixtral-8x7b",
        2,
        layout=LAYOUT.replace(dp=4, ep=4),
        job=JOB.replace(dtype="fp8", fp8_recipe="blockwise"),
    ),
    "a step of a server": _base(
        "llama3-8b",
        4,
        layout=Layout(tp=4, micro_batch=4),
        job=JOB.replace(mode="inference", cached_tokens=3000),
    ),
    "a step of a server of experts": _base(
        "mixtral-8x7b",
        2,
        layout=Layout(tp=4, ep=4, etp=1, micro_batch=4),
        job=JOB.replace(mode="inference", cached_tokens=300),
    ),
    "a step of a server of latent attention": _base(
        "deepseek-v2-lite",
        3,
        layout=Layout(micro_batch=4),
        job=FEW_TOKENS.replace(mode="inference", cached_tokens=300, seq_len=1),
    ),
} | {
    name: Base(PLAIN.replace(**changes), Layout(micro_batch=2), FEW_TOKENS, ("part",))
    for name, changes in {
        "latent attention": {"latent_attention": LATENT},
        **MODELS_OF_PARTS,
    }.items()
}
"""What is varied, each in a form in which its parts have an effect."""
SECTIONS = ("attention", "block", "norms", "inputs", "head", "hybrid", "mtp")
"""Sections of a model, each of which it always has."""
SHAPES = (
    "tp",
    "cp",
    "cp_kind",
    "cp_balanced",
    "ep",
    "etp",
    "micro_batch",
    "sequence_parallel",
    "ep_overlap",
)
"""Fields of a layout that shapes depend on."""


def changes_of(base: Base) -> Iterator[tuple[str, str, Any]]:
    """Every change of one field: of which record, its name, its value."""
    for name, value in other_values(base.layout):
        if name in SHAPES:
            yield "layout", name, value
    for name, value in other_values(base.job):
        yield "job", name, value
    yield "job", "dtype", "fp32"
    yield "job", "dtype", "fp8"
    for name in ("lamb", "lion", "sgd", "adafactor", "plain-sgd", "adam16bit", "muon"):
        yield "job", "optimizer", name
    if isinstance(base.model, Transformer):
        for name, value in other_values(base.model):
            yield "model", name, value
        for name, part in parts_of(base.model):
            for size, value in other_values(part):
                yield "part", f"{name}.{size}", value


def parts_of(model: Transformer) -> Iterator[tuple[str, Any]]:
    """Name and record of every optional part that a model has."""
    for record in (model, *(getattr(model, name) for name in SECTIONS)):
        for field in fields(record):
            if field.name not in SECTIONS and is_dataclass(getattr(record, field.name)):
                yield field.name, getattr(record, field.name)


def varied_models(base: Base) -> Iterator[Model]:
    """The model of a base, and its possible variants by one field."""
    yield base.model
    for record, field, value in changes_of(base):
        if record in base.varied and record in ("model", "part"):
            try:
                yield _changed(base, record, field, value).model
            except PerfModelError:
                continue


def figures(model: Model, layout: Layout, job: Job) -> dict[str, float]:
    """Figures of a model, and of every block of it on one rank, without those that are 0."""
    figures: dict[str, float] = {}
    for group in (parameters(model), step_flops(model, job)):
        figures |= {field.name: float(getattr(group, field.name)) for field in fields(group)}
    if isinstance(model, Transformer):
        figures["cache"] = sum(layer_cache_bytes(model, layout.tp, 1000, 2.0))
    figures["optimizer.bytes"] = optimizer_op(1000, job).bytes
    for i, (block, count) in enumerate(blocks(model, job, Shard.of(layout))):
        figures[f"{i}.blocks"] = count
        figures |= {f"{i}.{name}": value for name, value in _block_figures(block)}
        for part, of_experts in (("dense", False), ("experts", True)):
            shapes = block.weight_shapes(experts=of_experts)
            figures[f"{i}.{part}.weights"] = sum(
                m * n * number for (m, n), number in shapes.items()
            )
            products = orthogonalisation(block, job, experts=of_experts)
            figures[f"{i}.{part}.orthogonalised"] = sum(
                op.flops * number for op, number in products.items()
            )
    return {name: value for name, value in figures.items() if value}


def _block_figures(block: BlockOps) -> Iterator[tuple[str, float]]:
    """FLOPs, bytes and number of the kernels of each phase, bytes and number of its collectives,
    and all sizes."""
    for field in fields(block):
        value = getattr(block, field.name)
        if isinstance(value, (int, float)):
            yield field.name, float(value)
        elif field.name == "activation_bytes":
            yield from ((f"keeps.{mode.name}", getattr(value, mode.name)) for mode in fields(value))
        elif field.name.endswith("_comm"):
            yield from _comm_figures(field.name, value)
        elif isinstance(value, tuple):
            yield from _kernel_figures(field.name, value)


def _kernel_figures(
    phase: str, kernels: Sequence[tuple[KernelOp, int]]
) -> Iterator[tuple[str, float]]:
    yield f"{phase}.kernels", float(sum(count for _, count in kernels))
    yield f"{phase}.flops", sum(op.flops * count for op, count in kernels)
    yield f"{phase}.bytes", float(sum(op.bytes * count for op, count in kernels))


def _comm_figures(phase: str, comms: Sequence[Comm]) -> Iterator[tuple[str, float]]:
    yield f"{phase}.bytes", sum(comm.bytes * comm.count for comm in comms)
    yield f"{phase}.number", float(sum(comm.count for comm in comms))
    yield f"{phase}.overlap", sum(comm.bytes * comm.count for comm in comms if comm.overlappable)
    yield f"{phase}.beside", sum(comm.bytes * comm.count for comm in comms if comm.beside_attention)
    yield f"{phase}.follows", sum(comm.bytes * comm.count for comm in comms if comm.follows)


def cases() -> Iterator[StoredCase]:
    """Figures of every base and of its possible variants."""
    for name, base in BASES.items():
        yield StoredCase(name, name, figures(base.model, base.layout, base.job))
        changes = list(dict.fromkeys(changes_of(base)))
        for change in changes:
            if change[0] in base.varied:
                yield from _case(name, base, [change])
        for place in range(COMBINED):
            yield from _case(name, base, _combined(f"{name} {place}", changes))


def _combined(name: str, changes: Sequence[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
    """Three changes drawn by a name, most of which stay the same where changes are added."""
    # A hash ranks each change by itself; a generator's draws would all move with their number.
    ranks = {str(change): zlib.crc32(f"{name} {change}".encode()) for change in changes}
    return sorted(changes, key=lambda change: ranks[str(change)])[:3]


def _case(name: str, base: Base, changes: Sequence[tuple[str, str, Any]]) -> Iterator[StoredCase]:
    """The figures of a variant, where it is possible."""
    try:
        for record, field, value in changes:
            base = _changed(base, record, field, value)
        values = figures(base.model, base.layout, base.job)
    except PerfModelError:
        return
    yield StoredCase(name, ", ".join(f"{field}={value}" for _, field, value in changes), values)


def _changed(base: Base, record: str, field: str, value: Any) -> Base:
    """The base with one field of a record changed, or one of a part of its model (`part.field`)."""
    if record == "part":
        assert isinstance(base.model, Transformer)
        name, field = field.split(".")
        part = replace(dict(parts_of(base.model))[name], **{field: value})
        record, field, value = "model", name, part
    return replace(base, **{record: getattr(base, record).replace(**{field: value})})


if __name__ == "__main__":
    write_cases(TABLE, cases())
