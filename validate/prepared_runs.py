"""Tables of the record with what their notes say in columns of their own.

The package reads columns alone. Rows of the record were collected before it knew keys of job files
as columns, so that some of their settings stand in prose: adapters, vocabularies of tokenizers, the
release of a recipe. This step, outside the package, turns them into columns once; every study reads
the record through it.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pandas as pd

from perfmodel.catalog.networks import read_network

Row = dict[str, Any]
_DENSE_WORDS: Final = {"no": 0, "first": 1, "one": 1, "two": 2, "three": 3}
_RECIPES_WITHOUT_RELEASE: Final = (
    "used by that recipe",
    "default config of that release",
    "framework NGC ",
    "train/tr11-176B-ml",
)
_LAUNCHES_UNKNOWN: Final = "launch blocking state not stated"


def prepared(files: Iterable[Path], folder: Path) -> list[Path]:
    """Write prepared tables of runs (`prepare`) to a folder under their own names; files of other
    kinds are returned as they are."""
    paths = []
    for file in files:
        table = pd.read_csv(file, low_memory=False) if file.suffix == ".csv" else pd.DataFrame()
        if not {"case_id", "notes"} <= set(table.columns):
            paths.append(file)
            continue
        # Collections have tables of the same name, such as published/x.csv and published2/x.csv.
        target = folder / file.name
        if target.exists():
            target = folder / f"{file.parent.name}-{file.name}"
        prepare(table).to_csv(target, index=False)
        paths.append(target)
    return paths


def prepare(table: pd.DataFrame) -> pd.DataFrame:
    """Add columns for the settings that the notes of a table's rows state. Cells that are filled
    stay."""
    records: list[Row] = table.astype(object).where(table.notna(), None).to_dict("records")  # pyright: ignore[reportAssignmentType]
    settings_of_rows = [_settings_in_notes(row) for row in records]

    # A column is made, or filled, where any row's notes state it; other rows keep their cells.
    names: dict[str, None] = {}
    for settings in settings_of_rows:
        names |= dict.fromkeys(settings)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, settings in zip(records, settings_of_rows, strict=True):
        for name, cells in columns.items():
            cells.append(settings[name] if name in settings else row.get(name))
    return table.assign(**columns)


def _settings_in_notes(row: Row) -> Row:
    """The settings that a row's notes state, by column; a later rule overrides an earlier one."""
    settings: Row = {}
    for change in CHANGES:
        settings |= change(row)
    return settings


def _text(row: Row, name: str) -> str:
    """A cell as text; an empty one where the cell is empty or the column is absent."""
    value = row.get(name)
    return "" if value is None else str(value)


def _is_empty(row: Row, name: str) -> bool:
    """Whether a cell is empty."""
    return not _text(row, name).strip()


def adapters(row: Row) -> Row:
    """Read LoRA from a row: all weights are frozen, and the rank is 0 where the notes do not state
    it."""
    notes = _text(row, "notes")
    if not re.search(r"(?<![\w])lora\b", notes, re.IGNORECASE):
        return {}
    # The rank decides how many parameters are trained.
    rank = re.search(r"LoRA rank (\d+)", notes)
    settings: Row = {"job.frozen": "true", "job.adapter_rank": int(rank[1]) if rank else 0}
    # Only a known rank says how many bytes are exchanged.
    exchanges = bool(
        re.search(r"lora_a2a=(1|true)", _text(row, "launch_and_overlap"), re.IGNORECASE)
    )
    return settings | {"job.adapter_all_to_all": "true" if exchanges and rank else "false"}


def sequence_length(row: Row) -> Row:
    """Read `sequence length 2048` from the notes."""
    # A cell of the column counts before the notes: it was collected on purpose.
    noted = re.search(r"sequence length (\d+)", _text(row, "notes").lower())
    return {"seq_len": int(noted[1])} if noted and _is_empty(row, "seq_len") else {}


def vocabulary(row: Row) -> Row:
    """Read the number of the tokenizer's entries, which frameworks pad: `V=50257`, `vocabulary
    about 250k`."""
    notes = _text(row, "notes").lower()
    if not _is_empty(row, "vocab"):
        return {}
    # A number in the notes is exact; thousands are rounded and count only where there is none.
    if exact := re.search(r"\bv=(\d+)\b", notes):
        return {"tokenizer_vocab": int(exact[1])}
    if rounded := re.search(r"\bvocabulary about (\d+)k\b|\b(\d+)k vocabulary\b", notes):
        return {"tokenizer_vocab": int(rounded[1] or rounded[2]) * 1000}
    return {}


def dense_layers(row: Row) -> Row:
    """Read the number of leading layers without experts: `1 dense layer`, `first layer dense`."""
    noted = re.search(
        r"\b(\d+|no|one|two|three) dense layers?\b|\b(first) layer (?:is )?dense\b",
        _text(row, "notes").lower(),
    )
    if not noted or not _is_empty(row, "first_dense_layers"):
        return {}
    word = noted[1] or noted[2]
    return {"first_dense_layers": _DENSE_WORDS[word] if word in _DENSE_WORDS else int(word)}


def decoder_length(row: Row) -> Row:
    """Read the tokens of a T5's decoder: `decoder length 128`."""
    noted = re.search(r"decoder length (\d+)", _text(row, "notes").lower())
    return (
        {"model.decoder_seq_len": int(noted[1])}
        if noted and "t5" in _text(row, "model").lower()
        else {}
    )


def experts(row: Row) -> Row:
    """Read which dispatcher sends tokens to experts, and whether it overlaps with computation."""
    notes = _text(row, "notes").lower()
    dispatchers = (
        ("hybridep", "hybridep"),
        ("deepep", "deepep"),
        ("all-to-all dispatcher", "alltoall"),
    )
    settings: Row = {}
    named = next((name for word, name in dispatchers if word in notes), "")
    if named:
        settings["job.expert_dispatcher"] = named
    if overlap := re.search(r"expert-communication overlap (on|off)", notes):
        settings["layout.ep_overlap"] = "true" if overlap[1] == "on" else "false"
    return settings


def overlap(row: Row) -> Row:
    """Read which communication overlaps with computation: none where notes say `no comm overlap`;
    torchtitan's tensor parallelism is `async` (training.enable_async_tensor_parallel, which counts
    from `torch.compile` on).

    What the README of Megatron-LM times overlaps by `--tp-comm-overlap` as well (NVIDIA/Megatron-LM
    README.md of Core 0.8, Training Speed and Scalability; read with times in view), which its rows
    leave out.
    """
    if "no comm overlap" in _text(row, "notes").lower():
        return {
            "layout.tp_overlap": "false",
            "layout.overlap_grad_reduce": "false",
            "layout.overlap_param_gather": "false",
        }
    # Without tensor parallelism there is nothing that could overlap.
    if int(row.get("tp") or 1) == 1:
        return {}
    if titan := re.search(r"\b(async|vanilla) tensor parallel", _text(row, "notes").lower()):
        return {"layout.tp_overlap": "true" if titan[1] == "async" else "false"}
    page = _text(row, "url_or_repo")
    is_readme_table = "NVIDIA/Megatron-LM@" in page and "README performance section" in page
    return {"layout.tp_overlap": "true"} if is_readme_table else {}


def recipe(row: Row) -> Row:
    """The release of the recipe that the row's settings are of: of the framework, by the notes
    (`release 26.04`), or of the launch scripts, by the tag of the page; `default` where recipes
    have none."""
    notes = _text(row, "notes")
    page = _text(row, "url_or_repo")
    release = re.search(r"release (\d+\.\d+)", notes)
    if release and "in the recipe" in notes and "pre-training" in notes:
        return {"recipe_release": f"v{release[1]}"}
    # Launch scripts are found by the tag of the page that the row was read from.
    tag = re.search(r"\(tag v(\d+\.\d+)", page)
    if tag and "in the launch scripts of the tag" in notes:
        return {"recipe_release": f"v{tag[1]}"}
    # Scripts whose state of launch blocking is unknown cannot be taken at their defaults.
    refers = any(phrase in f"{notes} {page}" for phrase in _RECIPES_WITHOUT_RELEASE)
    return {"recipe_release": "default"} if refers and _LAUNCHES_UNKNOWN not in notes else {}


def batch_per_replica(row: Row) -> Row:
    """Read the batch of a replica: `batch per DP rank 36`."""
    noted = re.search(r"batch per dp rank (\d+)", _text(row, "notes").lower())
    if not noted or not _is_empty(row, "global_batch"):
        return {}
    # Replicas are what the devices are divided into by the other degrees, unless the row says it.
    devices_of_replica = 1
    for name in ("tp", "pp", "cp"):
        devices_of_replica *= int(row.get(name) or 1)
    n_devices = int(row.get("n_devices") or devices_of_replica)
    replicas = int(row.get("dp") or max(1, n_devices // devices_of_replica))
    return {"global_batch": int(noted[1]) * replicas}


def shards(row: Row) -> Row:
    """Read `FSDP+DP`: weights are sharded over some of the replicas, but the notes do not state
    over how many."""
    noted = re.search(r"fsdp\s*\+\s*dp\b", _text(row, "notes").lower())
    return {"sharding": "FSDP+DP"} if noted and _text(row, "sharding").lower() == "fsdp" else {}


def sharded_optimizer(row: Row) -> Row:
    """Read `optimizer states sharded` as ZeRO-1, where no stage of ZeRO is stated."""
    notes = _text(row, "notes").lower()
    return (
        {"zero_stage": 1}
        if "optimizer states sharded" in notes and _is_empty(row, "zero_stage")
        else {}
    )


def compiled(row: Row) -> Row:
    """Read whether the step is compiled: `torch.compile=yes`, `torch.compile off`, or `... compile`
    at the end of the framework's name."""
    noted = re.search(r"torch\.compile\b[ =]*(no|off)?", _text(row, "notes").lower())
    named = re.search(r"[ ,]compile$", _text(row, "framework_as_stated").lower())
    in_recipe = re.search(r"\bcompile\b", _text(row, "dtype_recipe").lower())
    # Notes that name torch.compile without `no` or `off` say that it is on.
    is_compiled = bool(noted and not noted[1]) or bool(named or in_recipe)
    if not is_compiled and not noted:
        return {}
    launch = _text(row, "launch_and_overlap")
    switch = f"compile={int(is_compiled)}"
    return {"launch_and_overlap": f"{launch}; {switch}" if launch else switch}


def liger_kernels(row: Row) -> Row:
    """Read `liger kernels`: fused norms, rotary embeddings and activations, and the head fused with
    the loss."""
    if "liger kernels" not in _text(row, "notes").lower():
        return {}
    return {
        "job.eager_kernels": "[]",
        "job.chunked_loss": "true",
        "job.in_place_activation": "true",
    }


def benchmark_scripts(row: Row) -> Row:
    """Settings of FlagPerf's DeepSpeed scripts, which gather weights that they keep for backward,
    and train models of Hugging Face without gradient checkpointing."""
    page = _text(row, "url_or_repo")
    if "FlagOpen/FlagPerf" not in page or not re.search(r"/[^/]+(?<!megatron)-deepspeed/", page):
        return {}
    settings: Row = {"job.saves_gathered_weights": "true"}
    return settings | ({"recompute": "none"} if _is_empty(row, "recompute") else {})


def accumulated_batch(row: Row) -> Row:
    """OpenLM's batch of a device, which `--accum-freq` divides into micro-batches.

    open_lm/params.py: `--batch-size` is "Batch size per GPU"; open_lm/train.py: with a batch size
    of 8 and an accum-freq of 4 "you only process 2 items at a time". Rows whose notes have the
    page's command were collected as if each micro-batch had them all; their step times follow from
    tokens per second (read with results in view).
    """
    noted = re.search(
        r"micro-batch (\d+) and (\d+) accumulations of the page's command", _text(row, "notes")
    )
    collected_batch = row.get("global_batch")
    if (
        not noted
        or "mlfoundations/open_lm" not in _text(row, "url_or_repo")
        or collected_batch is None
    ):
        return {}
    # The page's batch is of a device, over all of its accumulations.
    per_device = int(noted[1])
    accumulations = int(noted[2])
    global_batch = per_device * int(row["dp"])
    settings: Row = {
        "micro_batch": per_device // accumulations,
        "num_microbatches": accumulations,
        "global_batch": global_batch,
    }
    step_s = row.get("measured_iter_time_s")
    if step_s is None:
        return settings
    # A step time that was computed from the rate, with too large a batch, is too long by as much.
    return settings | {"measured_iter_time_s": float(step_s) * global_batch / int(collected_batch)}


_ORDINALS: Final = {"other": 2, "second": 2, "third": 3, "fourth": 4}


def experts_in_some_layers(row: Row) -> Row:
    """Read `experts in every OTHER layer`, and `capacity factor 1.25`, beyond which experts drop
    tokens."""
    notes = _text(row, "notes").lower()
    settings: Row = {}
    if layers := re.search(r"experts in every (other|second|third|fourth) layer", notes):
        settings["model.experts.every"] = _ORDINALS[layers[1]]
    if capacity := re.search(r"capacity factor (\d+(?:\.\d+)?)", notes):
        settings["job.expert_capacity_factor"] = float(capacity[1])
    return settings


def framework_as_stated(row: Row) -> Row:
    """Use ATorch's entry of the catalog for rows that were collected before there was one."""
    return (
        {"framework": "atorch@2023"}
        if _text(row, "framework_as_stated").startswith("ATorch")
        else {}
    )


def memory_unit(row: Row) -> Row:
    """GiB where a page copies what torchtitan (components/metrics.py:
    `memory: {max_reserved_gib:5.2f}GiB`) or KempnerForge (kempnerforge/metrics/memory.py: bytes
    over `1024**3`) logs, whatever the page's heading says."""
    kind = _text(row, "memory_kind")
    by_kempnerforge = _text(row, "framework").startswith("kempnerforge") and kind == "as logged"
    return {"memory_unit": "GiB"} if by_kempnerforge or "logged by torchtitan" in kind else {}


def collected_adapters(row: Row) -> Row:
    """Empty the columns of network adapters where the stated link contradicts them: they were
    collected from other numbers, such as an instance's name."""
    nics_per_node = row.get("nics_per_node")
    link = _text(row, "inter_link_as_stated")
    if nics_per_node is None or not link:
        return {}
    adapters = int(float(nics_per_node))
    network = read_network(link)
    # What the words say in full is right, and a column that says otherwise was collected wrongly.
    other_figures = network.adapters is not None and network.adapters != adapters
    # Two columns were collected together and are emptied together.
    rate = row.get("nic_gbit_per_s")
    other_rate = network.detail > 0 and rate is not None and float(rate) != network.gbit_per_s
    is_instance = f"{adapters}xlarge" in link
    if (network.detail == 2 and (other_figures or other_rate)) or is_instance:
        return {"nics_per_node": None, "nic_gbit_per_s": None}
    return {}


def step_of_diffusion(row: Row) -> Row:
    """Read that frozen encoders run in the step, and that it updates a moving average of the
    weights: `EMA; image and text encoders run in the step`."""
    notes = _text(row, "notes")
    settings: Row = {}
    encoders = re.search(r"\b(image)?(?: and )?(text)? encoders? runs? in the step\b", notes)
    if encoders and encoders[1]:
        settings["job.cached_latents"] = "false"
    if encoders and encoders[2]:
        settings["job.cached_text"] = "false"
    if re.search(r"\bEMA\b", notes):
        settings["job.weight_average"] = "true"
    return settings


_OPTIMIZERS: Final = {"LAMB": "lamb", "SGD": "plain-sgd"}
"""Optimizers by what notes call them; torch.optim.SGD has no momentum unless it is told one."""


def optimizer(row: Row) -> Row:
    """Read the optimizer that the notes name among their settings: `batch 20 per GPU, SGD`."""
    named = re.search(r"(?:^|[,;] )(LAMB|SGD)(?=[,;]|$)", _text(row, "notes"))
    if not named or not _is_empty(row, "job.optimizer"):
        return {}
    return {"job.optimizer": _OPTIMIZERS[named[1]]}


_LIMITED_POWER_W: Final = {"B200": 750}
"""Power limits of the devices that torchao's pages call power limited, in watts.

pytorch/ao pull request 3566, by the author of its pages: a "750W limited device" beside one of
1000 W (read with results in view)."""


def power_limit(row: Row) -> Row:
    """Read the limit of devices that torchao's pages call power limited: a part of their name."""
    is_limited = "power limited" in _text(row, "notes")
    if not is_limited or "pytorch/ao" not in _text(row, "url_or_repo"):
        return {}
    device = _text(row, "device")
    limit_w = _LIMITED_POWER_W.get(device.partition("-")[0])
    return {"device": f"{device} {limit_w}W"} if limit_w else {}


CHANGES: Final[tuple[Callable[[Row], Row], ...]] = (
    adapters,
    sequence_length,
    vocabulary,
    dense_layers,
    decoder_length,
    experts,
    overlap,
    recipe,
    batch_per_replica,
    shards,
    sharded_optimizer,
    compiled,
    liger_kernels,
    benchmark_scripts,
    accumulated_batch,
    experts_in_some_layers,
    framework_as_stated,
    memory_unit,
    collected_adapters,
    step_of_diffusion,
    optimizer,
    power_limit,
)
"""What is read from notes, each as a function of a row to columns."""
