"""Programs of open-instruct that train on OLMo-core, and the launcher that its scripts run through.

Their arguments are called as those of Hugging Face's Trainer (`open_instruct/olmo_core_utils.py`,
`dpo.py`), but precision and sharding are fixed: products in bf16, and weights that each node shards
by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import ATTENTION, is_on
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._table import NUMBER, WHOLE, Fields, Rule, read_only, words
from perfmodel.ingest.launch._trainer import TRAINER
from perfmodel.ingest.launch.shell import Word

_BUDGET: Final = "activation_memory_budget"
_RECOMPUTE: Final = (
    "gradient_checkpointing",
    _BUDGET,
    "activation_checkpointing_mode",
    "moe_recompute_each_block",
)
_CONTEXT: Final = ("cp_degree", "context_parallel_degree", "cp_strategy")
_DEGREES: Final = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "moe_expert_parallel_degree": "ep",
}
_LOSS: Final = "loss_implementation"


def _context(settings: Mapping[str, Any]) -> Fields:
    degree = WHOLE.read(settings.get("cp_degree", settings.get("context_parallel_degree", 1)))
    if degree == 1:
        return {}
    kinds = {"llama3": "all_gather", "zig_zag": "ring", "ulysses": "ulysses"}
    return {"cp": degree, "cp_kind": words(kinds).read(settings.get("cp_strategy", "llama3"))}


def _recompute(settings: Mapping[str, Any]) -> Fields:
    """Recomputation of whole layers, of modules, or by a memory budget."""
    whole_layers = is_on(settings.get("gradient_checkpointing")) or is_on(
        settings.get("moe_recompute_each_block")
    )
    if whole_layers or settings.get("activation_checkpointing_mode") == "selected_modules":
        return {"recompute": "full"}
    budget = NUMBER.read(settings.get(_BUDGET, 1))
    if budget >= 1:
        return {"recompute": "none"}
    # torch.compile chooses the operators to recompute by solving a knapsack problem; the choice
    # depends on the graph.
    doubt = (
        f"memory may be wrong: {_BUDGET}={budget:g} lets torch.compile choose what is recomputed, but the prediction "
        "recomputes what selective recomputation does"
    )
    return {"recompute": "selective", "doubt.recompute": doubt}


OLMO_CORE: Final[LaunchFormat] = replace(
    TRAINER,
    name="open-instruct",
    frameworks=("olmo-core",),
    framework=lambda fields, entries: "olmo-core",
    # FSDP within a node and copies across nodes, in bf16 (`olmo_core_finetune.py` and `dpo.py`).
    always={"zero": 3, "shard_ranks": "node", "dtype": "bf16", "grad_dtype": "fp32"},
    table=(
        *TRAINER.table,
        *(read_only(name, field) for name, field in _DEGREES.items()),
        Rule(keys=_CONTEXT, read=_context, fields=("cp",)),
        Rule(keys=_RECOMPUTE, read=_recompute, fields=("recompute",)),
        read_only("attn_backend", "flash_attention", ATTENTION),
        Rule(
            keys=(_LOSS,),
            read=lambda settings: (
                {"chunked_loss": True} if settings[_LOSS] == "fused_linear" else {}
            ),
        ),
    ),
    harmless=(
        *TRAINER.harmless,
        "compile_model",
        "config_name",
        "mixer_list*",
        "fused_optimizer",
        "activation_checkpointing_modules",
        "exp_name",
        "with_tracking",
        "*wandb*",
        "local_cache_dir",
        "moe_expert_parallel_path",
        "moe_checkpoint_block_internals",
        "checkpointing_*",
        "ephemeral_save_interval",
        "keep_last_n_checkpoints",
        "cache_*",
        "transform_fn*",
        "clean_checkpoints*",
        "*eval*",
    ),
)
"""The format of their commands; it comes with OLMo-core's own defaults in place of the
Trainer's."""


def trains_on_olmo_core(texts: Sequence[str]) -> bool:
    """Whether a command starts a program of open-instruct that is written on OLMo-core.

    Its older program for DPO, of the same name, is started by `accelerate launch`.
    """
    names = [PurePosixPath(text) for text in texts]
    if any(
        "olmo_core" in path.name and path.suffix in (".py", "")
        for path in names
        if path.name[:1] not in ("-", "")
    ):
        return True
    is_dpo = any(path.name == "dpo.py" and path.parent.name == "open_instruct" for path in names)
    return is_dpo and not any(path.name in ("accelerate", "deepspeed") for path in names)


_SUBMITTERS: Final = {"mason.py": "--num_nodes", "gantry": "--replicas"}
"""Programs that start the command after their `--` on several nodes, with their option for the
number of nodes."""


def behind_submitter(argv: Sequence[Word]) -> tuple[Sequence[Word], int]:
    """The command that a launcher of whole jobs starts on every node, and the number of nodes.

    mason and gantry take options up to a `--` of their own; the number of processes behind it is
    that of a node, which mason multiplies (`mason.py`, `make_internal_command`).
    """
    texts = [word.text for word in argv]
    submitter = next((text for text in texts if PurePosixPath(text).name in _SUBMITTERS), "")
    if not submitter or "--" not in texts:
        return argv, 1
    end = texts.index("--")
    option = _SUBMITTERS[PurePosixPath(submitter).name]
    nodes = 1
    for i, text in enumerate(texts[:end]):
        name, sign, value = text.partition("=")
        if name.replace("-", "_") == option.replace("-", "_"):
            number = value if sign else texts[i + 1]
            nodes = int(number) if number.isdecimal() and int(number) else 1
    return argv[end + 1 :], nodes


def over_nodes(processes: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """Convert settings of a launcher on one node to those of the whole job.

    Args:
        processes: arguments of Accelerate's launcher or torchrun's, written with hyphens.
        nodes: number of nodes on which the command runs.
    """
    job = dict(processes)
    if nodes == 1:
        return job
    every = str(job.get("num-processes", ""))
    if every.isdecimal():
        job["num-processes"] = str(int(every) * nodes)
    elif not str(job.get("nnodes", "")).isdecimal():
        job["nnodes"] = str(nodes)
    return job
