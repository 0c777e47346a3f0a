"""Measured kernels and collectives of public tables; the conventions of each source are translated
on reading.

What fits and prices them sees typed columns alone; which download a row is of decides nothing
beyond this file.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.catalog import device
from perfmodel.errors import TableError, UnknownNameError
from perfmodel.ingest.tables import number, relabel, text
from perfmodel.ops import NONGATED_MOE
from perfmodel.spec import Device

if TYPE_CHECKING:
    import pandas as pd

_EAGER: Final = frozenset({"neusight", "aceso", "sailor_aceso", "pipedream"})
"""Sources timed one eager call at a time: their times hide behind a host-side launch floor."""
_ORDER: Final = (
    "estimate_train_time",
    "simumax",
    "vllm-0.24.0",
    "vllm-0.14.0",
    "vllm",
    "vidur",
    "llmservingsim",
    "sglang",
    "trtllm",
    "xla_perf_tables",
    "neusight",
    "sailor_aceso",
    "aceso",
    "deepbench",
    "pipedream",
)
"""Sources and prefixes of software, in order of similarity to a training job on torch with cuBLAS.

Training profilers come first, then torch/cuBLAS routes of serving stacks, own kernels of serving
stacks, and eager timings last because their small kernels hide behind the launch floor.
"""
UNDER_LOAD: Final = frozenset({"simumax"})
"""Sources whose times are sustained; those of all others are bursts: its products of 8192 reach 1.1
PFLOP/s on B200 where those of B300 and GB300 elsewhere hold 1.6 to 2.0, and 228 TFLOP/s on
A100-PCIE where its power limit allows some 214 (`perfmodel.cost.sustained_seconds`); products of
4096 take about as long as elsewhere."""
SERVER_KERNELS: Final = "aiconfigurator"
"""Source of the tables whose kernels are those of inference servers (TensorRT-LLM, vLLM), timed in
CUDA graphs."""
_SERVING_PROFILER: Final = "llmservingsim"
_QUANTISING_SOURCE: Final = SERVER_KERNELS
_QUANTISING_SOFTWARE: Final = "trtllm"
"""Beginning of the software, in `_QUANTISING_SOURCE`, whose products of 8 bits are whole layers:
they find the scale of their 16-bit operand and quantise it first. Their times tend to about 14 us
and 5 bytes for each of its elements where the product gets narrow, those of 16 bits to nothing."""
OWN_ORDER: Final = -1
"""Rank of a user's own measurements, before all of these."""
FILL_CACHES: Final = (SERVER_KERNELS, _SERVING_PROFILER)
"""Sources whose attention over a causal prompt also copies its keys and values into the server's
cache.

On H100, 8,192 tokens and 32 heads take 400 us with keys for every head. With keys for every eighth
head they take 85 us less, which is the time of 200 MB of traffic. Whole sequences without a cache
(encoders) show no such difference."""
_TF32: Final = ("sailor_aceso", "xla_perf_tables")
"""Sources whose fp32 products run in TF32 on NVIDIA Ampere and later (their tables say so)."""
_BEFORE_TF32: Final = ("Maxwell", "Pascal", "Volta", "Turing")
_TYPES_IN_VARIANT: Final = "xla_perf_tables"
"""Source that mixes kernels of several operand types under one software, told apart by the
variant."""
_KEYS_OF_WHOLE_BATCH: Final = "vllm"
"""Software of the serving profiler whose decode rows state the cached keys of all sequences
together.

If it were the keys of each sequence, nine in ten of its larger rows would beat the memory bandwidth
by up to ten times. As the sum over sequences, times are one to three times those of other sources
at every batch.
"""
_LAYER_NORM_MODEL: Final = "Phi-mini-MoE-instruct"
"""Model of the serving profiler whose norms are LayerNorm, one kernel of torch, though its
`norm_unfused` rows call them RMSNorm of several: on the same device and shape they take a seventh
of the time of those that are."""
_NOT_KERNELS: Final = (
    "collective",
    "moe_alltoall",
    "suspect_",
    "composite",
    "layers",
    "forward_layers",
    "e2e",
    "edges",
    "rnn",
)
"""File name prefixes of tables that hold no kernels, or rows not to be fitted."""
_NOT_FITTED: Final = ("alps_gh200", "hopper_blackwell", "published")
"""Folders that are not used for fitting: a source without a stated licence; tables newer than the
shipped weights; whole training steps."""


def kernel_table_paths(folder: Path | str) -> list[Path]:
    """Licensed kernel tables under a folder of measurement tables (one sub-folder per source),
    sorted.

    Raises:
        TableError: if there are none.
    """
    # Sorted, so that a fit does not depend on the order of a file system.
    kernel_tables = [
        p for p in sorted(Path(folder).glob("*/*.csv.gz")) if not p.name.startswith(_NOT_KERNELS)
    ]
    paths = [p for p in kernel_tables if p.parent.name not in _NOT_FITTED]
    if not paths:
        raise TableError(
            f"{folder}: the folder has no tables of measurements; give the one that has a sub-folder per source"
        )
    return paths


def stand_in_order(source: str, software: str) -> int:
    """Rank of how closely a source's kernels resemble those of a training job, 0 the closest;
    `OWN_ORDER` for sources outside the public tables."""
    ranks = (
        rank for rank, name in enumerate(_ORDER) if source == name or software.startswith(name)
    )
    return next(ranks, OWN_ORDER)


def quantises_operands(source: str, software: str) -> bool:
    """Whether a source's 8-bit matrix products include the time to quantise their first operand."""
    return source == _QUANTISING_SOURCE and software.startswith(_QUANTISING_SOFTWARE)


def times_host_launch(source: str) -> bool:
    """Whether a source's times include the host's kernel launch."""
    return source in _EAGER


def clean_kernels(table: "pd.DataFrame") -> "pd.DataFrame":
    """A kernel table (columns of the data README) with cleaned cells and the columns below added; a
    cleaned table is returned as it is.

    - `flaw`: why the row's time cannot be used; `""` if it can
    - `contradicted`: whether other rows of its source contradict it; such rows are predicted, but
      not fitted
    - `host_launch`: whether its time contains the host's launch
    - `order`: how closely it stands for a training job (`stand_in_order`)

    The cleaned columns are `source` and `software` (never empty; software differs by operand
    types), `dtype` (type in which the kernel ran), `op` (operator that ran), `seq_kv` (keys of one
    sequence) and `mixed_n_decode` (0 in pure decoding).
    """
    # Cleaning twice would tell software apart twice.
    if "flaw" in table:
        return table
    source = text(table, "source", "measured")
    software = text(table, "software", "unknown")
    variant = text(table, "variant")
    # Kernels of different operand types are different software, as the regressors tell software
    # apart.
    typed = (source == _TYPES_IN_VARIANT) & (variant != "")
    software = np.where(typed, software + " " + variant, software).astype(object)
    pairs = relabel(source + "\t" + software, lambda label: stand_in_order(*label.split("\t")))
    test_split = (text(table, "device") == "P4") & (text(table, "origin_split") == "test")
    columns: dict[str, Any] = {
        "source": source,
        "software": software,
        "dtype": _dtype_that_ran(table, source),
        "op": _op_that_ran(table, source, variant),
        "flaw": relabel(variant, _flaw),
        # NeuSight's splits disagree by 2.8x here; the few test rows break the trend of the many.
        "contradicted": test_split & (text(table, "op") == "linear"),
        "host_launch": relabel(source, times_host_launch).astype(bool),
        "order": pairs.astype(np.int64),
    }
    if "seq_kv" in table:
        columns |= _keys_of_one_sequence(table, source)
    return table.assign(**columns)


def is_marked_suspect(variant: str) -> bool:
    """Whether a row's `variant` says that its time cannot be trusted, as `calibrate` marks
    disturbed rows."""
    return variant.startswith("suspect")


def _flaw(variant: str) -> str:
    if is_marked_suspect(variant):
        return "marked as suspect"
    if variant == "unit_not_stated":
        return "unit of the time is not stated"
    if variant.endswith("loaded"):
        return "measured on a device that had worked for a while"
    if "beside_" in variant:
        return "measured while a collective ran"
    return "measured with cold caches" if variant.endswith("cold") else ""


def _dtype_that_ran(table: "pd.DataFrame", source: np.ndarray) -> np.ndarray:
    """`tf32` if a source's fp32 products are known to use tensor cores; 8-bit types with any
    scaling are `fp8`."""
    dtype = text(table, "dtype")
    dtype = np.where(dtype == "mxfp8", "fp8", dtype).astype(object)
    uses = np.isin(source, _TF32) & (text(table, "op_family") == "gemm") & (dtype == "fp32")
    # Older devices have no TF32: the same call ran in full precision there.
    uses[uses] = relabel(text(table, "device")[uses], _has_tf32).astype(bool)
    return np.where(uses, "tf32", dtype).astype(object)


def _has_tf32(name: str) -> bool:
    try:
        accelerator: Device = device(name)
    except UnknownNameError:
        return False
    return accelerator.vendor == "NVIDIA" and accelerator.architecture not in _BEFORE_TF32


def _op_that_ran(table: "pd.DataFrame", source: np.ndarray, variant: np.ndarray) -> np.ndarray:
    op = text(table, "op")
    # The op column names the requested operator, and these rows are known to have run another one.
    single = (
        (op == "norm_unfused")
        & (source == _SERVING_PROFILER)
        & (text(table, "model") == _LAYER_NORM_MODEL)
    )
    ungated = (text(table, "op_family") == "moe") & relabel(
        variant, lambda v: "nongated" in v
    ).astype(bool)
    return np.where(single, "layer_norm", np.where(ungated, NONGATED_MOE, op)).astype(object)


def _keys_of_one_sequence(table: "pd.DataFrame", source: np.ndarray) -> dict[str, np.ndarray]:
    """Keys that one sequence attends to, if a source states the cached keys of the whole batch: its
    share of them, plus its own token's. A batch with more sequences than keys has no cached keys
    and takes almost no time.

    Decode rows of serving profilers repeat the batch in `mixed_n_decode`: nothing decodes beside
    them.
    """
    batch = number(table, "batch")
    keys = number(table, "seq_kv")
    shared = (source == _SERVING_PROFILER) & (text(table, "software") == _KEYS_OF_WHOLE_BATCH)
    shared &= (text(table, "phase") == "decode") & (batch > 1)
    keys = np.where(shared, keys // np.maximum(batch, 1) + 1, keys)
    # One query per sequence is decoding itself.
    several_sequences = (number(table, "mixed_n_decode") > 0) & ~(
        (number(table, "seq_q") == 1) & (keys > 1)
    )
    mixed = ("mixed_n_decode", "mixed_kv_decode")
    return {"seq_kv": keys} | {
        name: np.where(several_sequences, number(table, name), 0.0) for name in mixed
    }


_HELD_TO: Final = (
    ("direct", re.compile(r"^custom$", re.IGNORECASE)),
    ("collnet", re.compile(r"collnet|sharp", re.IGNORECASE)),
    ("nvls_tree", re.compile(r"^nvls_?tree$", re.IGNORECASE)),
    ("nvls", re.compile(r"^nvls$", re.IGNORECASE)),
    ("tree", re.compile(r"^tree$", re.IGNORECASE)),
    ("ring", re.compile(r"^ring$", re.IGNORECASE)),
)
"""Algorithms that a run may be forced to use, by NCCL's names, with the cells that state them."""
_REPEATED: Final = re.compile(
    r"(^|;)(in_place|out_of_place)$|^\d+_concurrent_groups$|^allreduce(_large)?$"
)
"""Variants, or ends of them, that name how a run was repeated, not another way of communicating."""
_BESIDE: Final = re.compile(r"(?:^|_)groups_at_once_(\d+)$")
"""End of the variant of rows for which `calibrate` ran several groups at once (`concurrent` in a
plan)."""
_HARMLESS: Final = (
    "",
    "rounded_busbw",
    "above_nic_rate_by_in_network_reduction",
    "device_inferred",
)
"""Checks that a row may carry and still be used."""
_BY_LIBRARY: Final = ("", "auto")


def clean_collectives(table: "pd.DataFrame") -> "pd.DataFrame":
    """A collective table (columns of the data README) with the columns below added; a cleaned table
    is returned as it is.

    - `way`: how it was run, if not by the usual kind of communication; else `""`
    - `doubtful`: whether it repeats a test (`in_place`), or a `check` names a defect
    - `disturbed`: whether others used the machine while it was timed (its `variant` begins with
      `suspect`)
    - `groups`: how many groups ran at once, each of them timed; 1 for a group alone
    - `held_to`: the algorithm that was forced (`ring`, `tree`, `nvls`, `nvls_tree`, `collnet`),
      else `""`
    - `library_chose`: whether the algorithm was left to the library
    """
    if "way" in table:
        return table
    algorithm = text(table, "algorithm")
    variant = text(table, "variant")
    # Disturbance, and groups beside, say how a row was timed, not another way of communicating.
    disturbed = relabel(variant, is_marked_suspect).astype(bool)
    return table.assign(
        way=np.where(disturbed, "", relabel(variant, _plain_variant)).astype(object),
        disturbed=disturbed,
        groups=relabel(variant, _groups_at_once).astype(np.int64),
        doubtful=(number(table, "in_place", 0.0) != 0)
        | relabel(text(table, "check"), _defective).astype(bool),
        held_to=relabel(algorithm, _held_to),
        library_chose=np.isin(algorithm, _BY_LIBRARY),
        host_launches=relabel(variant, _launched_by_host).astype(bool),
    )


def published_collectives(table: "pd.DataFrame") -> "pd.DataFrame":
    """Published bus bandwidths (`busbw_GBps`, `n_devices`, `n_nodes`, `link`) with the columns of a
    collective table.

    Percentiles (`id` ends in `5th` or `95th`) are dropped.
    """
    import pandas as pd

    table = table.loc[~table["id"].str.contains(r"-(?:5|95)th$")]
    ranks = table["n_devices"].astype(float)
    size = table["size_bytes"].astype(float)
    # Bus bandwidth is defined by what each rank sends in a ring: an all-reduce goes round twice,
    # the others once.
    rounds = np.where(table["collective"] == "all_reduce", 2, 1)
    moved_bytes = rounds * (ranks - 1) / ranks * size
    adapters = table["link"].str.extract(r"(\d+) links per node", expand=False).astype(float)
    columns = {
        "source": "published",
        "device": table["device"],
        "interconnect": table["link"],
        "collective": table["collective"],
        "algorithm": "auto",
        "num_ranks": ranks,
        "num_nodes": table["n_nodes"],
        "ranks_per_node": ranks / table["n_nodes"],
        "bytes": size,
        "time_us": moved_bytes / table["busbw_GBps"] / 1e3,
        "nics_per_node": adapters,
        "variant": table["id"],
    }
    return pd.DataFrame(columns).reset_index(drop=True)


def _plain_variant(variant: str) -> str:
    return _REPEATED.sub("", _BESIDE.sub("", variant))


def _launched_by_host(variant: str) -> bool:
    return variant.endswith("_eager")


def _groups_at_once(variant: str) -> int:
    match = _BESIDE.search(variant)
    return int(match.group(1)) if match else 1


def _defective(check: str) -> bool:
    return not all(part in _HARMLESS for part in check.split(";"))


def _held_to(name: str) -> str:
    return next((known for known, cell in _HELD_TO if cell.search(name)), "")
