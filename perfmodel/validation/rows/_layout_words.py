"""Reads word columns of published runs that describe the layout: schedule, recompute, sharding."""

from dataclasses import dataclass
from typing import Any, Final, get_args

from perfmodel.spec import Model, RecomputeModule, Transformer
from perfmodel.spec.notation import SCHEDULES, schedule_and_drains, with_drains
from perfmodel.validation.rows._cells import Row, count, number, text
from perfmodel.validation.rows.phrases import Reading, read_phrases
from perfmodel.validation.rows.vocabulary import RECOMPUTE, SCHEDULE, SHARDING

# --- schedule
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StatedSchedule:
    """A pipeline schedule in words."""

    name: str = ""
    """Registered name; empty if the words name none."""
    chunks: int | None = None
    """Model chunks per stage; None if the words do not state them."""
    micro_batches: int | None = None
    """Micro-batches per replica; None if the words do not state them."""
    is_one_of_several: bool = False
    """Whether the words fit several schedules, of which `name` is one."""


_HAS_CHUNKS: Final = frozenset({"", "1f1b", "interleaved"})
"""Schedules that a number of model chunks per stage makes, or belongs to."""


@dataclass(frozen=True)
class _ScheduleCell:
    """The parts of a cell of the column `schedule`, such as `chimera:4` or `1f1b*4`."""

    name_words: str
    """Words that name the schedule."""
    parameter: str
    """The number behind a colon, as some schedules take one; empty if there is none."""
    drains: int
    """How often a step runs through the pipeline."""


def _schedule_cell(row: Row) -> _ScheduleCell:
    """Divide a row's cell of the column `schedule` into its parts."""
    one_run, drains = schedule_and_drains(text(row, "schedule"))
    name_words, _, parameter = one_run.rpartition(":")
    if name_words and parameter.strip().isdecimal():
        return _ScheduleCell(name_words, parameter.strip(), drains)
    return _ScheduleCell(one_run, "", drains)


def _is_file(row: Row) -> bool:
    """Whether the schedule is one of the user's, in a file, whose path keeps its case."""
    return text(row, "schedule").lower().startswith("file:")


def schedule_of(row: Row) -> StatedSchedule:
    """The schedule in a row's column `schedule`. Words that are not understood leave it open."""
    if _is_file(row):
        return StatedSchedule(text(row, "schedule"))
    cell = _schedule_cell(row)
    reading = read_phrases(cell.name_words, SCHEDULE)
    # Of several names the more special one counts, in any order (`1F1B, interleaved`).
    name = reading.first(*(set(SCHEDULES) - {"1f1b"})) or reading.first("1f1b")
    is_one_of_several = not name and reading.has_meaning("some zero bubble")
    if is_one_of_several:
        name = "zb-h1"

    chunks = reading.figure("chunks")
    micro_batches = reading.figure("micro-batches")
    if name == "gpipe" and chunks:
        # GPipe's chunks are micro-batches (Huang et al., arXiv 1811.06965; `chunks` of torch's
        # `Pipe`).
        chunks, micro_batches = None, micro_batches or chunks
    if name not in _HAS_CHUNKS:
        chunks = None
    if name and cell.parameter:
        name = f"{name}:{cell.parameter}"
    if name:
        name = with_drains(name, cell.drains)
    return StatedSchedule(name, chunks, micro_batches, is_one_of_several)


def unread_schedule_words(row: Row) -> tuple[str, ...]:
    """Words of the column `schedule` that are not understood."""
    if _is_file(row):
        return ()
    reading = read_phrases(_schedule_cell(row).name_words, SCHEDULE)
    schedule = schedule_of(row)
    # Model chunks have no effect under a schedule that sets their number itself.
    has_no_chunks = (
        reading.has_meaning("chunks") and schedule.chunks is None and schedule.name != "gpipe"
    )
    return (*reading.unread, "chunks") if has_no_chunks else reading.unread


def columns_of_schedule(row: Row) -> dict[str, int]:
    """Columns that a schedule's words state: chunks per stage, micro-batches per replica."""
    schedule = schedule_of(row)
    stated = {"vpp": schedule.chunks, "num_microbatches": schedule.micro_batches}
    return {name: value for name, value in stated.items() if value}


# --- recompute
# ------------------------------------------------------------------------------------------------


def _recompute_readings(row: Row) -> tuple[Reading, Reading]:
    """Return the readings of the columns `recompute` and `recompute_detail`."""
    mode = read_phrases(text(row, "recompute"), RECOMPUTE)
    detail = read_phrases(text(row, "recompute_detail"), RECOMPUTE)
    return mode, detail


_RECOMPUTE_MODES: Final = {
    "none": "none",
    "full": "full",
    "uniform": "full",
    "layers": "full",
    "every": "selective",
    "selective": "selective",
    "policy full": "full",
    "policy custom": "full",
    "policy none": "none",
    "policy products": "selective",
    "policy products and attention": "selective",
    "policy offload": "selective",
    "policy feed-forward": "selective",
}
_MODULES: Final = get_args(RecomputeModule)


def _share_of_layers(reading: Reading) -> float | None:
    """The share of the layers that are recomputed in full, in a reading; None if it states none."""
    part_and_whole = reading.figures("share")
    if part_and_whole:
        recomputed, layers = part_and_whole
        return min(1.0, recomputed / layers) if layers else None
    percent = reading.figure("percent")
    if percent is not None:
        return min(1.0, percent / 100)
    if reading.has_meaning("half"):
        return 1 / 2
    for parts, meaning in ((3, "thirds"), (4, "quarters")):
        if reading.has_meaning(meaning):
            return min(1.0, (reading.figure(meaning) or 1) / parts)
    return None


def recompute_of(row: Row) -> str:
    """The recomputation mode closest to a row's words; empty if not stated.

    `recompute_detail` may tell which modules `selective` repeats (`recompute_modules_of`). Of JAX's
    policies those repeat most of a layer that keep but its projections of attention.
    """
    # The column `recompute` counts before its detail.
    for reading in _recompute_readings(row):
        mode = _mode_of(reading)
        if mode:
            return mode
    return ""


def _mode_of(reading: Reading) -> str:
    """The recomputation mode of one reading; empty if it states none."""
    # A share of layers goes before the mode that stands beside it (`full, 2 of 3 layers`), names of
    # modules alone mean `selective`, and recompute that is only switched on is that of whole
    # layers.
    share = _share_of_layers(reading)
    if share is not None:
        return "full" if share else "none"
    mode = reading.first(*_RECOMPUTE_MODES)
    if mode:
        return _RECOMPUTE_MODES[mode]
    if reading.all_of(*_MODULES):
        return "selective"
    if reading.has_meaning("not some"):
        return "none"
    return "full" if reading.has_meaning("some") else ""


def repeated_layers(row: Row, model: Model, stages: int) -> int | None:
    """Number of fully recomputed layers per stage in a row's words (`full block 21 layers`,
    `every 2nd layer`, `2 of 3 layers`); None if not stated.
    """
    if not isinstance(model, Transformer):
        return None
    per_stage = -(-model.layers // stages)
    for reading in _recompute_readings(row):
        share = _share_of_layers(reading)
        if share is not None:
            # All layers and none are modes of their own.
            return round(per_stage * share) if 0 < share < 1 else None
        layers = reading.figure("layers")
        # In Megatron-LM's method `uniform` the number of layers is that of a group, and all groups
        # are repeated.
        if layers is not None and not reading.has_meaning("uniform"):
            return layers
        every = reading.figure("every")
        if every:
            return round(per_stage / every)
    return None


def offloads_activations(row: Row) -> bool:
    """Whether a row states offloading of activations (`minimal_offloaded`)."""
    return any(reading.first("policy offload", "offload") for reading in _recompute_readings(row))


def leaves_policy_open(row: Row) -> bool:
    """Whether a row uses a custom recomputation policy without stating it (`custom`)."""
    says_custom = any(reading.has_meaning("policy custom") for reading in _recompute_readings(row))
    return says_custom and not text(row, "recompute_detail")


_BETWEEN_PRODUCTS: Final[tuple[RecomputeModule, ...]] = ("layernorm", "mlp_act", "moe_act")
"""Modules of a layer between products of weights and attention."""
_POLICY_MODULES: Final[dict[str, tuple[RecomputeModule, ...]]] = {
    "policy products": ("core_attn", *_BETWEEN_PRODUCTS),
    "policy products and attention": _BETWEEN_PRODUCTS,
    "policy offload": ("core_attn", *_BETWEEN_PRODUCTS),
    # A compiler leaves out the feed-forward's last product, whose result nothing needs.
    "policy feed-forward": ("core_attn", "layernorm", "mlp"),
}
"""Modules that are recomputed under JAX's policies that save results of products with weights (JAX
documentation, `jax.checkpoint_policies`: checkpoint_dots_with_no_batch_dims), on the device or on
the host. Products of attention have batch dimensions."""


def recompute_modules_of(row: Row) -> tuple[RecomputeModule, ...]:
    """Return the modules of `selective` recomputation, as Megatron-Core names them."""
    named: tuple[str, ...] = ()
    for reading in _recompute_readings(row):
        named += reading.all_of(*_MODULES)
        named += _POLICY_MODULES.get(reading.first(*_POLICY_MODULES), ())
    return tuple(module for module in _MODULES if module in named)


# --- sharding
# ------------------------------------------------------------------------------------------------

_FULLY_SHARDED: Final = (
    "zero 3",
    "fsdp group",
    "hybrid",
    "copies and shards",
    "infinity",
    "zero++",
    "hpz",
)
"""Meanings that imply stage 3 of ZeRO."""


def _sharding_reading(row: Row) -> Reading:
    return read_phrases(text(row, "sharding"), SHARDING)


def _keeps_weights(reading: Reading) -> bool:
    """Whether weights stay gathered between the forward and the backward pass."""
    return reading.has_meaning("keeps weights") or reading.has_meaning("not gathers weights again")


def stage_in_words(reading: Reading) -> int | None:
    """The stage of ZeRO that words for sharding state; None if they state none."""
    stage = reading.figure("stage")
    if stage is not None:
        return stage
    # FSDP has a strategy that shards nothing. Else the strongest of several meanings counts:
    # `DDP with a distributed optimizer` shards the optimizer.
    if reading.has_meaning("no shards"):
        return 0
    if reading.has_meaning("zero 2") or _keeps_weights(reading):
        return 2
    if reading.first(*_FULLY_SHARDED):
        return 3
    if reading.has_meaning("zero 1"):
        return 1
    return 0 if reading.first("zero 0", "replicas") else None


def stages_named(reading: Reading) -> frozenset[int]:
    """Stages of ZeRO that words for sharding may mean: FSDP by itself is stage 2 or 3, and data
    parallelism says nothing about the optimizer."""
    stage = stage_in_words(reading)
    if stage is None:
        return frozenset()
    if reading.figure("stage") is not None:
        return frozenset({stage})
    if stage == 3:
        return frozenset({2, 3})
    if stage == 0 and not reading.first("zero 0", "no shards"):
        return frozenset({0, 1})
    return frozenset({stage})


def secondary_shards_of(row: Row) -> int | None:
    """Ranks of a second copy of the weights (ZeRO++'s `hpZ`), if a row states them."""
    return _sharding_reading(row).figure("hpz")


def sharding_of(row: Row, dp: int, pp: int) -> dict[str, Any]:
    """Layout fields `zero`, `replicate`, `offload_states` from `zero_stage` and `sharding`.

    Weights that FSDP shards stay gathered between the micro-batches of a pipeline (arXiv
    2407.21783, section 3.3.2; torchtitan's default). `HSDP` without a number shards inside a node.

    Raises:
        Unusable: a `zero_stage` that is not a whole number.
    """
    # Numbers in the column `zero_stage` go before words, which may mean two stages.
    reading = _sharding_reading(row)
    names_fsdp = bool(
        reading.first("zero 3", "fsdp group", "hybrid", "copies and shards", "zero 2")
    )
    is_fsdp = names_fsdp and not reading.first("stage", "zero 1")
    zero = stage_in_words(reading)
    if number(row, "zero_stage") is not None:
        zero = count(row, "zero_stage", least=0)

    # Weights that stay gathered between micro-batches are not sharded as in stage 3.
    if is_fsdp and zero is not None and (pp > 1 or _keeps_weights(reading)):
        zero = min(zero, 2)

    stated: dict[str, Any] = {} if zero is None else {"zero": zero}
    copies = _copies(row, reading, dp)
    if stated.get("zero", 1) and copies > 1:
        stated["replicate"] = copies
    states = _states_on_host(reading, stated.get("zero"), is_fsdp)
    return stated | ({"offload_states": states} if states else {})


def _copies(row: Row, reading: Reading, dp: int) -> int:
    """Groups of ranks that each hold a copy of what is sharded; 1 if all ranks share it, or if it
    is not stated."""
    # A mesh is written as copies x shards, in the order of its dimensions (torch's
    # `init_device_mesh`).
    mesh = reading.figures("copies and shards")
    ranks = reading.figure("group") or reading.figure("fsdp group") or reading.figure("hybrid") or 0
    if mesh:
        _, ranks = mesh
    copies = reading.figure("copies")
    if not ranks and copies and dp % copies == 0:
        return copies
    if reading.has_meaning("hybrid") and not ranks:
        ranks = max(1, count(row, "devices_per_node", 8) // count(row, "tp", 1))
    return dp // ranks if 0 < ranks < dp and dp % ranks == 0 else 1


def _states_on_host(reading: Reading, zero: int | None, is_fsdp: bool) -> str:
    """The states that lie in host memory, as `Layout.offload_states` names them."""
    # FSDP's offload and ZeRO-Infinity move weights with their states, that of any other ZeRO states
    # alone.
    moves_weights = bool(reading.first("infinity", "offload weights"))
    if is_fsdp and reading.has_meaning("offload"):
        moves_weights = True
    if zero == 3 and moves_weights:
        return "weights"
    if zero and reading.first("offload", "offload optimizer", "offload weights", "infinity"):
        return "optimizer"
    return ""
