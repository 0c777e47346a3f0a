"""Ranks the unread settings of a launch file by how much they may change a prediction.

This is the one place that all formats share. A format lists what it knows to be harmless; every
other unread setting comes here. Its name tells what it affects (`harm_of`). Settings of the model,
of the training method, of the layout, of precision and of memory make a prediction doubtful, and
`doubts` says so at the head of the answer. All others are named after them, and those of logging,
checkpoints and data (`HARMLESS`) not at all.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final

from perfmodel.errors import plain_text
from perfmodel.units import plural


class Harm(IntEnum):
    """Parts of a prediction that an unread setting may make wrong, worst first."""

    MODEL = 0
    TRAINED = 1
    LAYOUT = 2
    PRECISION = 3
    MEMORY = 4
    TIME = 5


SUBJECTS: Final = {
    Harm.MODEL: "the model",
    Harm.TRAINED: "the training method",
    Harm.LAYOUT: "the layout",
    Harm.PRECISION: "the precision",
    Harm.MEMORY: "memory",
}
"""Parts of a prediction that the head of an answer calls doubtful; settings that only cost a little
time are left out."""

_WORDS: Final = (
    # The first line that has a word of the setting's name decides: `--lora-target-layers` is about
    # adapters, though it has a word of the model too, and `--recompute-num-layers` about memory.
    (Harm.TRAINED, "lora qlora dora peft adapter adapters freeze frozen trainable finetuning"),
    (
        Harm.TIME,
        "fused fusion fuse overlap kernel gemm comm init initializer dropout loss coeff turbo sms",
    ),
    (Harm.MEMORY, "reuse mem galore badam apollo lomo lisa zenflow"),
    (Harm.TIME, "fa"),
    (Harm.MEMORY, "recompute remat offload offloading swap checkpointing"),
    (
        Harm.PRECISION,
        "fp8 fp4 bf16 fp16 fp32 int8 int4 mxfp8 nvfp4 float8 half amp dtype precision quant quantize",
    ),
    (Harm.PRECISION, "quantization quantizer qat bits autocast amax"),
    (
        Harm.LAYOUT,
        "parallel parallelism pipeline tensor tp pp cp ep dp sp vpp zero shard shards sharding fsdp ulysses",
    ),
    (
        Harm.LAYOUT,
        "mesh axis axes replicas replicate nodes gpus nnodes processes stage stages ranks extend",
    ),
    (
        Harm.MODEL,
        "layer layers hidden head heads ffn intermediate dim dims expert experts moe router topk vocab",
    ),
    (
        Harm.MODEL,
        "mamba ssm hybrid spec window kv latent mla mtp nextn depth width embed embedding embeddings embd",
    ),
    (
        Harm.MODEL,
        "attention attn gated glu activation norm layernorm rmsnorm tied tie untie encoder decoder vision",
    ),
    (
        Harm.MODEL,
        "patch image bias architecture block blocks channels gate state groups model hc engram indexer",
    ),
    (Harm.MODEL, "depths lf conv conv1d conv2d filter filtering variant linear sparse delta"),
    (Harm.MEMORY, "memory optimizer optim bucket buffer"),
    (Harm.MODEL, "size sizes"),
)
_PHRASES: Final = (
    # Ranks of latent attention, not of adapters.
    (re.compile(r"(^|-)(q|kv|o)-lora-(rank|dim)"), Harm.MODEL),
    # Gates by other names, and their kernels where no other switch names the gate.
    (re.compile(r"^(use-)?(fused-|quick-|clamped-)?(swi|ge|re|li|i)?glu$"), Harm.MODEL),
    # Feed-forwards and losses that run over one part of the sequence after another.
    (re.compile(r"(^|-)(tiled|tiling)(-|$)"), Harm.MEMORY),
    # What is kept of layers that are recomputed: inputs on the host, or divided among ranks.
    (re.compile(r"checkpoint-in-cpu|cpu-checkpoint|partition(ed)?-activations"), Harm.MEMORY),
    # Attention that looks at a part of the sequence (GPT-NeoX's `--sparsity`).
    (re.compile(r"(^|-)sparsity(-|$)"), Harm.MODEL),
    # MindSpeed frees activations of experts (`--moe-zero-memory`).
    (re.compile(r"zero-memory"), Harm.MEMORY),
    # Programs that fine-tune call the rank of adapters so.
    (re.compile(r"^(rank|alpha|r)$|(^|-)(oft|boft|ia3|vera|loha|lokr|reft)(-|$)"), Harm.TRAINED),
    # Norms whose scales are stored less one, which has nothing to do with ZeRO.
    (re.compile(r"zero-centered"), Harm.TIME),
    # Weights that are trained whole beside adapters, such as embeddings.
    (re.compile(r"(^|-)(modules-to-save|additional-target)(-|$)"), Harm.TRAINED),
    # Stacks of layers of several kinds, some of which run beside one another.
    (re.compile(r"(^|-)hybrid(-|$)"), Harm.MODEL),
    (
        re.compile(r"checkpoint(ing)?-?activation|activations?-?checkpoint|gradient-checkpoint"),
        Harm.MEMORY,
    ),
    (re.compile(r"(^|-)(log|logging|wandb|tensorboard)(-|$)"), Harm.TIME),
    # Routing among the experts of a few groups sends fewer messages; it changes no size.
    (re.compile(r"topk-group"), Harm.TIME),
)
"""Phrases of several words that determine the harm of a name."""
_HARMLESS_BY_THEME: Final = {
    "logging": "log* *-log *-log-* *logging* *timers* timing-* *straggler* *-logger*",
    "printing": "print-* *verbose* *progress* app-tag*",
    "tracking": "wandb* tensorboard* swanlab* mlflow* comet* *report-to* one-logger* enable-one-logger",
    "profiling": "*profil* nsys*",
    "names of runs": "*experiment-name* run-name run-id job-name",
    "checkpoints": "save* load* no-save* no-load* ckpt* *-ckpt* dist-ckpt* async-save* *checkpoint-format* *retain*",
    "start": "*resume* pretrained-checkpoint finetune exit-* output-dir *checkpoint-dir* no-initialization hf-path*",
    "options of checkpoints": "override-opt* use-checkpoint-* auto-detect-ckpt-format",
    "data": "data-*path* *data-path* data-dir data-cache* data-impl data-args* *dataset* *dataloader*",
    "files": "num-workers *mmap* *-dir split mock-data merge-file vocab-file tokenizer-* *blend* *-json* no-shuffle",
    "masks": "reset-* *mask-loss* create-attention-mask* no-create-attention-mask* short-seq-prob mask-prob *prompt*",
    "evaluation": "eval* *-eval-* test-* valid-* skip-train *-interval *-interval-*",
    "length of the run": "train-iters train-samples train-tokens train-epochs *-epochs *-iters max-steps *curriculum*",
    "learning rate": "lr* *-lr *-lr-* min-lr *warmup* *weight-decay* *rampup*",
    "optimizer": "adam-* sgd-* muon-* clip-grad *grad-clip*",
    "numbers": "init-method* *-init-std *seed* *loss-coef* *loss-scale* *epsilon* *-eps *temperature* label-smoothing",
    "processes": "master-* node-rank rdzv-* local-rank local-ranks* role max-restarts tee redirects *timeout* hostfile",
    "launchers": "monitor-interval no-local-rank no-python launcher *nccl-communicator*",
    "housekeeping": "manual-gc* *wait-time* *unused-parameters* *jit*",
}
HARMLESS: Final = tuple(" ".join(_HARMLESS_BY_THEME.values()).split())
"""Settings, as patterns of their names, that change neither time nor memory of a step in any
framework."""
MOST_NAMED: Final = 12
"""Most names that a sentence lists."""


@dataclass(frozen=True)
class Unread:
    """A setting of a file that was not understood."""

    key: str
    line: int
    """Line of the file, from 1; 0 where it is not known."""
    harm: Harm
    meant: str = ""
    """A setting that is spelled nearly alike and that the file does not have; empty if there is
    none."""

    def __str__(self) -> str:
        remarks = [f"line {self.line}"] if self.line else []
        if self.meant:
            remarks.append(f"did you mean {self.meant}?")
        return plain_text(f"{self.key} ({'; '.join(remarks)})" if remarks else self.key)


def is_harmless(key: str, patterns: Iterable[str] = ()) -> bool:
    """Whether a setting is known to have no effect, by the patterns of its format or those of all
    formats."""
    if any(fnmatchcase(key, pattern) for pattern in patterns):
        return True
    name = _normalised_key(key)
    return any(fnmatchcase(name, pattern) for pattern in HARMLESS)


def harm_of(key: str) -> Harm:
    """The part of a prediction that may be wrong because a setting of this name was not read."""
    name = _normalised_key(key)
    for phrase, harm in _PHRASES:
        if phrase.search(name):
            return harm
    # Whole words are compared, not parts of them: `ep` is in `steps`, and `tp` in `http`.
    tokens = set(name.split("-"))
    for harm, vocabulary in _WORDS:
        if tokens & set(vocabulary.split()):
            return harm
    return Harm.TIME


def doubts(unread: Sequence[Unread], noun: str, settled: Iterable[Harm] = ()) -> tuple[str, ...]:
    """Sentences on what may be wrong in a prediction, worst first.

    Args:
        unread: settings that were not understood.
        noun: the format's word for a setting, such as `flag` or `key`.
        settled: facts that the caller states, which a file cannot make wrong.
    """
    sentences = []
    for harm, subject in SUBJECTS.items():
        guilty = [setting for setting in unread if setting.harm is harm]
        if guilty and harm not in settled:
            count = f"{len(guilty)} unread {plural(noun, len(guilty))}"
            sentences.append(f"{subject} may be wrong: {count}: {listed(list(map(str, guilty)))}")
    return tuple(sentences)


def listed(names: Sequence[str]) -> str:
    """Join names with commas, cut off after `MOST_NAMED`."""
    unnamed = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {unnamed} more" if unnamed > 0 else "")


def _normalised_key(key: str) -> str:
    """A name in lower case with hyphens; of a nested key only the last two parts.

    Tables further out hold settings of every kind and say nothing.
    """
    last = ".".join(key.split(".")[-2:])
    return re.sub(r"[_.\s]+", "-", last).strip("-").lower()
