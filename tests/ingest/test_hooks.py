"""`perfmodel hook`: the printed lines run beside a stand-in of each framework's interface, and what
they write is read as the same job's launch file is.

The stand-ins have the names, the classes and the defaults of the frameworks, as far as the lines
touch them.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.errors import LaunchFileError, UnknownNameError
from perfmodel.ingest.launch import HOOKS, Launch, hook_lines, parse_launch, read_launch, shape
from perfmodel.prediction import predict

MEGATRON = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --group-query-attention --num-query-groups 8 --ffn-hidden-size 5632 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 64 --bf16 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --transformer-impl transformer_engine --lr 1e-4 "
)
MEGATRON_MODULES = {
    "megatron/training/__init__.py": """
        import sys
        import argparse
        from megatron.training.arguments import add_megatron_arguments

        def get_args():
            args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(sys.argv[1:])
            args.world_size, args.data_parallel_size, args.rank = 8, 2, 0
            args.params_dtype = type("dtype", (), {"__repr__": lambda self: "torch.bfloat16"})()
            args.encoder_num_layers, args.encoder_seq_length = args.num_layers, args.seq_length
            args.padded_vocab_size = args.vocab_size
            args.virtual_pipeline_model_parallel_size = None
            return args
    """,
    "megatron/training/arguments.py": """
        import enum

        class AttnBackend(enum.Enum):
            auto = 5

        def add_megatron_arguments(parser):
            for name in ("num-layers hidden-size num-attention-heads seq-length max-position-embeddings vocab-size "
                         "ffn-hidden-size micro-batch-size global-batch-size num-experts moe-ffn-hidden-size "
                         "q-lora-rank kv-channels train-iters decoder-first-pipeline-num-layers").split():
                parser.add_argument(f"--{name}", type=int, default=None)
            for name, value in {
                "num-query-groups": 1, "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1,
                "context-parallel-size": 1, "expert-model-parallel-size": 1, "moe-router-topk": 2, "kv-lora-rank": 32,
                "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "mamba-state-dim": 128,
                "make-vocab-size-divisible-by": 128, "recompute-num-layers": None, "ddp-num-buckets": None,
                "img-h": 224, "retro-num-neighbors": 2, "dino-local-crops-number": 10, "cpu-offloading-num-layers": 0,
            }.items():
                parser.add_argument(f"--{name}", type=int, default=value)
            for name in ("attention-dropout", "hidden-dropout"):
                parser.add_argument(f"--{name}", type=float, default=0.1)
            parser.add_argument("--lr", type=float, default=None)
            for name, value in {
                "normalization": "LayerNorm", "position-embedding-type": "learned_absolute", "transformer-impl": None,
                "recompute-granularity": None, "moe-token-dispatcher-type": "allgather", "fp8-format": None,
                "moe-router-load-balancing-type": "aux_loss", "optimizer": "adam", "cuda-graph-impl": "none",
            }.items():
                parser.add_argument(f"--{name}", default=value)
            for name in ("group-query-attention swiglu untie-embeddings-and-output-weights bf16 fp16 "
                         "sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather "
                         "multi-latent-attention qk-layernorm use-flash-attn apply-layernorm-1p").split():
                parser.add_argument(f"--{name}", action="store_true")
            parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
            parser.add_argument("--attention-backend", default=AttnBackend.auto)
            return parser
    """,
    "megatron/__init__.py": "",
}
TITAN_TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 32
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
TITAN_SCRIPT = """
    from dataclasses import dataclass, field

    @dataclass(kw_only=True, slots=True)
    class Training:
        local_batch_size: int = 8
        global_batch_size: int = -1
        seq_len: int = 2048
        steps: int = 10000
        dtype: str = "float32"
        mixed_precision_param: str = "bfloat16"
        mixed_precision_reduce: str = "float32"
        enable_cpu_offload: bool = False
        unheard_of_offload: int = 7

    @dataclass(kw_only=True, slots=True)
    class Parallelism:
        data_parallel_replicate_degree: int = 1
        data_parallel_shard_degree: int = -1
        fsdp_reshard_after_forward: str = "default"
        tensor_parallel_degree: int = 1
        pipeline_parallel_degree: int = 1
        pipeline_parallel_schedule: str = "1F1B"
        context_parallel_degree: int = 1
        expert_parallel_degree: int = 1

    @dataclass(kw_only=True, slots=True)
    class ActivationCheckpoint:
        mode: str = "selective"
        selective_ac_option: str = "2"

    @dataclass(kw_only=True, slots=True)
    class ModelSpec:
        name: str
        flavor: str
        parallelize_fn: object

    @dataclass(kw_only=True, slots=True)
    class Config:
        model_spec: ModelSpec
        training: Training = field(default_factory=Training)
        parallelism: Parallelism = field(default_factory=Parallelism)
        activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)

    config = Config(
        model_spec=ModelSpec(name="llama3", flavor="8B", parallelize_fn=print),
        training=Training(local_batch_size=2, global_batch_size=32, seq_len=4096),
        parallelism=Parallelism(tensor_parallel_degree=2),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
    )
"""
BRIDGE_YAML = """
model:
  num_layers: 24
  hidden_size: 2048
  num_attention_heads: 16
  num_query_groups: 8
  ffn_hidden_size: 5632
  gated_linear_unit: true
  add_bias_linear: false
  normalization: RMSNorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  vocab_size: 32000
  seq_length: 4096
  tensor_model_parallel_size: 2
  activation_func: torch.nn.functional.silu
  hidden_dropout: 0.0
  attention_dropout: 0.0
train:
  micro_batch_size: 1
  global_batch_size: 32
mixed_precision: bf16_mixed
ddp:
  use_distributed_optimizer: true
"""
BRIDGE_SCRIPT = """
    from dataclasses import dataclass, field

    def silu(x):
        return x

    @dataclass
    class Llama:
        num_layers: int = 32
        hidden_size: int = 4096
        num_attention_heads: int = 32
        num_query_groups: int = 8
        ffn_hidden_size: int = 14336
        gated_linear_unit: bool = True
        add_bias_linear: bool = False
        normalization: str = "RMSNorm"
        position_embedding_type: str = "rope"
        share_embeddings_and_output_weights: bool = False
        vocab_size: int = None
        seq_length: int = 8192
        tensor_model_parallel_size: int = 1
        pipeline_model_parallel_size: int = 1
        virtual_pipeline_model_parallel_size: int = None
        activation_func: object = silu
        hidden_dropout: float = 0.0
        attention_dropout: float = 0.0
        bf16: bool = True
        unheard_of_offload: int = 3

    @dataclass
    class Train:
        micro_batch_size: int = None
        global_batch_size: int = None
        train_iters: int = None

    @dataclass
    class Ddp:
        use_distributed_optimizer: bool = True

    @dataclass
    class ConfigContainer:
        model: Llama
        train: Train
        ddp: Ddp = field(default_factory=Ddp)
        mixed_precision: object = None

    cfg = ConfigContainer(
        model=Llama(num_layers=24, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=5632, vocab_size=32000,
                    seq_length=4096, tensor_model_parallel_size=2),
        train=Train(micro_batch_size=1, global_batch_size=32),
    )
"""
NEMO_SCRIPT = """
    import fiddle

    recipe = fiddle.Config("pretrain", dict(resume=None),
        model=fiddle.Config("LlamaModel", {}, config=fiddle.Config("Llama3Config8B", dict(
            num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
            gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope",
            share_embeddings_and_output_weights=False, hidden_dropout=0.0, attention_dropout=0.0, unheard_of_offload=3,
            tensor_model_parallel_size=1, activation_func="silu", seq_length=8192,
        ), num_layers=24, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=5632, vocab_size=32000)),
        trainer=fiddle.Config("Trainer", {}, devices=8, num_nodes=1,
            strategy=fiddle.Config("MegatronStrategy", dict(pipeline_model_parallel_size=1),
                tensor_model_parallel_size=2,
                ddp=fiddle.Config("DistributedDataParallelConfig", dict(use_distributed_optimizer=True))),
            plugins=fiddle.Config("MegatronMixedPrecision", dict(fp8=None), precision="bf16-mixed")),
        data=fiddle.Config("MockDataModule", {}, seq_length=4096, micro_batch_size=1, global_batch_size=32),
    )
"""
FIDDLE = """
    class Buildable:
        pass

    class Config(Buildable):
        def __init__(self, target, defaults, **stated):
            self.target, self.defaults, self.stated = target, defaults, stated

    def ordered_arguments(config, include_defaults=False):
        return {**config.defaults, **config.stated} if include_defaults else dict(config.stated)
"""
DEEPSPEED_JSON = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
ENGINE_SCRIPT = f"""
    from types import SimpleNamespace

    model_config = SimpleNamespace(to_dict=lambda: {LLAMA_CONFIG!r})
    model_engine = SimpleNamespace(
        _config=SimpleNamespace(_param_dict={DEEPSPEED_JSON!r}), module=SimpleNamespace(config=model_config)
    )
"""
TRAINER_JSON = {
    "model_name_or_path": "config.json",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "gradient_checkpointing": True,
    "fsdp": "full_shard auto_wrap",
    "max_length": 2048,
    "packing": True,
}
TRAINER_SCRIPT = f"""
    from dataclasses import asdict, dataclass, field
    from types import SimpleNamespace

    @dataclass
    class SFTConfig:
        output_dir: str = "out"
        per_device_train_batch_size: int = 8
        gradient_accumulation_steps: int = 1
        bf16: bool = False
        fp16: bool = False
        gradient_checkpointing: bool = False
        fsdp: str = ""
        fsdp_config: dict = field(default_factory=lambda: {{"min_num_params": 0, "xla": False}})
        max_length: int = 1024
        packing: bool = False
        deepspeed: str = None
        optim: str = "adamw_torch_fused"
        use_liger_kernel: bool = False
        unheard_of_offload: int = 3

        def to_dict(self):
            return asdict(self)

    trainer = SimpleNamespace(
        args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, max_length=2048,
                       gradient_checkpointing=True, fsdp="full_shard auto_wrap", packing=True),
        model=SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {LLAMA_CONFIG!r})),
    )
"""
MAXTEXT_YAML = "model_name: llama2-7b\nper_device_batch_size: 2\nmax_target_length: 2048\nici_fsdp_parallelism: 8\n"
MAXTEXT_BASE = "model_name: default\nper_device_batch_size: 12.0\nmax_target_length: 2048\nunheard_of_offload: 3\n"
MAXTEXT_SCRIPT = """
    from MaxText import pyconfig

    config = pyconfig.HyperParameters()
"""
MAXTEXT_PYCONFIG = """
    class HyperParameters:
        def get_keys(self):
            return {"model_name": "llama2-7b", "per_device_batch_size": 2, "max_target_length": 2048,
                    "ici_fsdp_parallelism": 8, "unheard_of_offload": 3}
"""
NANOTRON_YAML = """
parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 4, sequence_length: 2048}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
model:
  dtype: bfloat16
  model_config:
    num_hidden_layers: 16
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_key_value_heads: 8
    vocab_size: 32000
    max_position_embeddings: 2048
    tie_word_embeddings: false
"""
NANOTRON_SCRIPT = """
    import dataclasses
    from types import SimpleNamespace

    import yaml

    @dataclasses.dataclass
    class Config:
        content: str

        def as_dict(self):
            return yaml.safe_load(self.content)

    trainer = SimpleNamespace(config=Config(open("run.yaml").read()))
"""


class Hooked(NamedTuple):
    """A job by its launch file, and by a script that the lines stand in."""

    file: str
    text: str
    script: str
    modules: dict[str, str] = {}  # noqa: RUF012
    arguments: list[str] = []  # noqa: RUF012


JOBS = {
    "megatron": Hooked(
        "run.sh",
        "torchrun --nproc_per_node 8 pretrain_gpt.py " + MEGATRON,
        "",
        MEGATRON_MODULES,
        MEGATRON.split(),
    ),
    "megatron-bridge": Hooked("run.yaml", BRIDGE_YAML, BRIDGE_SCRIPT),
    "nemo": Hooked("run.yaml", BRIDGE_YAML, NEMO_SCRIPT, {"fiddle.py": FIDDLE}),
    "torchtitan": Hooked("run.toml", TITAN_TOML, TITAN_SCRIPT),
    "deepspeed": Hooked("run.json", json.dumps(DEEPSPEED_JSON), ENGINE_SCRIPT),
    "hf-trainer": Hooked("run.json", json.dumps(TRAINER_JSON), TRAINER_SCRIPT),
    "maxtext": Hooked(
        "run.yml",
        MAXTEXT_YAML,
        MAXTEXT_SCRIPT,
        {
            "MaxText/__init__.py": "",
            "MaxText/pyconfig.py": MAXTEXT_PYCONFIG,
            "MaxText/configs/base.yml": MAXTEXT_BASE,
        },
    ),
    "nanotron": Hooked("run.yaml", NANOTRON_YAML, NANOTRON_SCRIPT),
}


def written_by_hook(name: str, folder: Path) -> Path:
    """The file that a hook's lines write when they run in a job's script."""
    job = JOBS[name]
    for file, text in job.modules.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (folder / job.file).write_text(job.text)
    script = folder / "pretrain_gpt.py"
    script.write_text(textwrap.dedent(job.script) + "\n" + hook_lines(name))
    environment = {**os.environ, "WORLD_SIZE": "8", "RANK": "0", "PYTHONPATH": str(folder)}
    subprocess.run(
        [sys.executable, str(script), *job.arguments],
        cwd=folder,
        env=environment,
        check=True,
        timeout=60,
    )
    return folder / "args.json"


def read_file(name: str, folder: Path) -> Launch:
    """The same job by its launch file, with what that file leaves open."""
    job = JOBS[name]
    given: dict[str, Any] = {"devices": 8}
    if name in ("deepspeed", "hf-trainer"):
        (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
        given |= {"model": pm.model(str(folder / "config.json")), "seq_len": 2048}
    return read_launch(folder / job.file, **given)


def test_every_framework_has_a_job() -> None:
    assert set(JOBS) == set(HOOKS)


@pytest.mark.parametrize("name", JOBS)
def test_what_a_hook_writes_is_read_as_the_launch_file_is(name: str, tmp_path: Path) -> None:
    path = written_by_hook(name, tmp_path)
    hooked, launch = (
        read_launch(path, seq_len=2048 if name == "deepspeed" else None),
        read_file(name, tmp_path),
    )
    assert hooked.missing == ()
    assert hooked.may_be_wrong == ()
    assert hooked.ignored == ()
    assert (hooked.layout, hooked.global_batch, hooked.seq_len) == (
        launch.layout,
        launch.global_batch,
        launch.seq_len,
    )
    assert hooked.devices == 8
    assert hooked.job_fields.get("dtype") == launch.job_fields.get("dtype")
    if name == "nemo":  # of NeMo 2 there is no launch file; Megatron-Bridge's has the same settings
        assert hooked.framework == "nemo"
        return
    assert hooked.framework == launch.framework
    assert (hooked.model is None) == (launch.model is None)
    assert shape(hooked.model) == shape(launch.model)
    assert launch.job_fields.items() <= hooked.job_fields.items()
    results = [predict(one.problem("dgx-h100"), layout=one.layout) for one in (hooked, launch)]
    assert results[0].step_time_s == results[1].step_time_s
    assert results[0].memory.to_dict() == results[1].memory.to_dict()


@pytest.mark.parametrize("name", ["megatron-bridge", "torchtitan", "hf-trainer"])
def test_a_setting_that_nobody_reads_is_a_doubt_unless_it_is_at_its_default(
    name: str, tmp_path: Path
) -> None:
    path = written_by_hook(name, tmp_path)
    content = path.read_text()
    assert content.count('"unheard_of_offload": ') == 2
    launch = parse_launch(
        content.replace('"unheard_of_offload": ', '"unheard_of_offload": 1', 1), str(path)
    )
    assert any("unheard_of_offload" in sentence for sentence in launch.may_be_wrong)


def test_only_one_process_writes(tmp_path: Path) -> None:
    script = textwrap.dedent(TITAN_SCRIPT) + "\n" + hook_lines("torchtitan")
    environment = {**os.environ, "WORLD_SIZE": "8", "RANK": "3"}
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=60
    )
    assert not (tmp_path / "args.json").exists()


def test_the_command_prints_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hook", "megatron"]) == 0
    assert capsys.readouterr().out == hook_lines("megatron")
    assert main(["hook"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Where a terminal is narrow, a row goes on below its second column.
    rows = [line for line in lines[1:-1] if not line.startswith(" ")]
    assert [row.split()[0] for row in rows] == list(HOOKS)


def test_a_framework_without_a_hook(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError):
        hook_lines("fairseq")
    assert main(["hook", "fairseq"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def titan_launch(**settings: Any) -> Launch:
    """A job of torchtitan as its hook writes it, with some settings beside its sizes."""
    sizes = {
        "model_spec": {"name": "llama3", "flavor": "8B"},
        "training": {"local_batch_size": 2, "global_batch_size": 32, "seq_len": 4096},
    }
    content = {"perfmodel_hook": "torchtitan", "devices": 8, "settings": sizes | settings}
    return parse_launch(json.dumps(content), "args.json")


@pytest.mark.parametrize(
    ("checkpoint", "mode"),
    [
        ({"_target_": "FullAC.Config"}, "full"),
        ({"_target_": "SelectiveAC.Config"}, "selective"),
        ({"_target_": "NoAC.Config"}, "none"),
        (None, "none"),
    ],
)
def test_a_class_of_torchtitans_checkpointing_is_read_as_its_mode(
    checkpoint: Any, mode: str
) -> None:
    """The mode is of the years until 2026. Other settings without a value say nothing of it."""
    layout = titan_launch(comm=None, activation_checkpoint=checkpoint, profiling=None).layout
    assert layout == titan_launch(activation_checkpoint={"mode": mode}).layout
    of_full = titan_launch(activation_checkpoint={"mode": "full"}).layout
    assert (layout == of_full) == (mode == "full")


@pytest.mark.parametrize(
    ("objects", "tables"),
    [
        (
            {"model_converters": {"converters": [{"_target_": "Float8LinearConverter.Config"}]}},
            {"model": {"converters": ["float8"]}},
        ),
        (
            {
                "model_converters": {"converters": [{"_target_": "MXLinearConverter.Config"}]},
                "debug": {"ranks": [0]},
            },
            {"model": {"converters": ["mx"]}},
        ),
        ({"loss": {"_target_": "ChunkedCELoss.Config"}}, {"loss": {"chunked": True}}),
        ({"loss": {"_target_": "CELoss.Config"}}, {}),
        ({"optimizer": {"_target_": "ChunkedAdam.Config"}}, {}),
        ({"model_converters": {"converters": []}}, {}),
    ],
)
def test_objects_of_torchtitan_are_read_as_the_tables_before_them(
    objects: dict[str, Any], tables: dict[str, Any]
) -> None:
    """Neither a loss that is computed whole nor an object of another kind changes anything."""
    fields = titan_launch(**objects).job_fields
    assert fields == titan_launch(**tables).job_fields
    assert (fields == titan_launch().job_fields) == (not tables)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"perfmodel_hook": "fairseq", "settings": {"a": 1}},
            "perfmodel_hook must be one of megatron",
        ),
        ({"perfmodel_hook": 3, "settings": {"a": 1}}, "perfmodel_hook must be one of megatron"),
        ({"perfmodel_hook": "megatron"}, "holds no settings"),
        ({"perfmodel_hook": "torchtitan", "devices": 8, "settings": 3}, "holds no settings"),
        (
            {"perfmodel_hook": "torchtitan", "devices": 0, "settings": {"a": 1}},
            "devices must be a whole number",
        ),
        ({"perfmodel_hook": "megatron", "devices": 8, "settings": {"a": 1}}, "too few arguments"),
        (
            {
                "perfmodel_hook": "deepspeed",
                "devices": 8,
                "settings": {"train_batch_size": 8},
                "model_config": {"model_type": "llama"},
            },
            "hidden_size",
        ),
    ],
)
def test_broken_files_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(pm.PerfModelError, match=message):
        parse_launch(json.dumps(content), "args.json")
    assert issubclass(LaunchFileError, pm.PerfModelError)
