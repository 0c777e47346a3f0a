"""Recipes by name: commands and scripts of torchtitan, Megatron-Bridge and NeMo 2, and files of
Primus."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.files import parse_toml
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.ingest.launch import _recipes as recipes
from perfmodel.spec import Transformer
from perfmodel.workload import parameter_count


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), name, **given)


def degrees(launch: Launch) -> tuple[int, ...]:
    assert launch.layout is not None
    return tuple(
        launch.layout.value(name) for name in ("tp", "pp", "cp", "ep", "dp", "zero", "micro_batch")
    )


TITAN_RUN = """
    NGPU=${NGPU:-"16"}
    MODULE=${MODULE:-"llama3"}
    CONFIG=${CONFIG:-"llama3_8b"}
    PYTORCH_ALLOC_CONF="expandable_segments:True" torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --role rank \\
      -m torchtitan.train --module ${MODULE} --config ${CONFIG} \\
      --training.local_batch_size=2 --parallelism.tensor_parallel_degree 4 "$@"
"""


@pytest.mark.parametrize(
    "text",
    [
        TITAN_RUN,
        "NGPU=16 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.local_batch_size 2 "
        "--parallelism.tensor_parallel_degree=4\n",
        "export NGPU=16 CONFIG=llama3_8b\nbash run_train.sh --parallelism.tensor_parallel_degree=4 "
        "--training.local_batch_size=2\n",
        "#SBATCH --nodes=2\nsrun torchrun --nnodes 2 --nproc_per_node 8 ./torchtitan/train.py --module=llama3 "
        "--config=llama3_8b --training.local_batch_size=2 --parallelism.tensor_parallel_degree 4\n",
    ],
)
def test_a_command_of_torchtitan(text: str) -> None:
    launch = read("run.sh", text)
    assert launch.framework.partition("@")[0] == "torchtitan"
    assert launch.model is not None
    assert launch.model.name == "llama3-8b"
    assert (degrees(launch), launch.devices, launch.seq_len) == ((4, 1, 1, 1, 4, 3, 2), 16, 8192)
    assert launch.may_be_wrong == launch.missing == ()


def test_a_command_of_torchtitan_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "70B"\n[training]\nseq_len = 4096\n'
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "CONFIG_FILE=./train_configs/mine.toml NGPU=8 ./run_train.sh --parallelism.tensor_parallel_degree 8\n"
    )
    launch = read_launch(script)
    assert (degrees(launch)[0], launch.seq_len, launch.devices) == (8, 4096, 8)
    script.write_text(
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file=./train_configs/llama3_70b.toml\n"
    )
    launch = read_launch(script)
    assert (degrees(launch)[0], launch.seq_len, launch.model and launch.model.name) == (
        8,
        8192,
        "llama3-70b",
    )
    assert any("was not found in the script's folder" in sentence for sentence in launch.ignored)


NEMO_SCRIPT = """
    import nemo_run as run
    from nemo.collections import llm

    def configure_recipe(nodes: int = 2, gpus_per_node: int = 8):
        recipe = llm.llama3_8b.pretrain_recipe(
            dir="/checkpoints", name="x", num_nodes=nodes, num_gpus_per_node=gpus_per_node,
        )
        recipe.trainer.strategy.tensor_model_parallel_size = 2
        recipe.trainer.strategy.context_parallel_size = 1
        recipe.data.micro_batch_size = 2
        return recipe

    run.run(configure_recipe(), executor=run.LocalExecutor())
"""
NEMO_COMMAND = """
    nemo llm pretrain --factory "llama3_8b(num_nodes=2)" trainer.strategy.tensor_model_parallel_size=2 \\
      trainer.strategy.context_parallel_size=1 data.micro_batch_size=2
"""


@pytest.mark.parametrize(("name", "text"), [("run.py", NEMO_SCRIPT), ("run.sh", NEMO_COMMAND)])
def test_a_recipe_of_nemo(name: str, text: str) -> None:
    launch = read(name, text)
    assert launch.framework.partition("@")[0] == "nemo"
    assert (degrees(launch), launch.devices, launch.global_batch) == (
        (2, 1, 1, 1, 8, 1, 2),
        16,
        512,
    )
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.may_be_wrong == ()


BRIDGE_SCRIPT = """
    from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

    cfg = llama3_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.train.global_batch_size = 128
"""
BRIDGE_COMMAND = """
    torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config \\
      model.tensor_model_parallel_size=4 train.global_batch_size=128
"""


@pytest.mark.parametrize(("name", "text"), [("run.py", BRIDGE_SCRIPT), ("run.sh", BRIDGE_COMMAND)])
def test_a_recipe_of_megatron_bridge(name: str, text: str) -> None:
    launch = read(name, text, devices=8)
    assert launch.framework.partition("@")[0] == "megatron-bridge"
    assert (degrees(launch), launch.global_batch, launch.seq_len) == (
        (4, 1, 2, 1, 1, 1, 1),
        128,
        8192,
    )
    assert launch.model is not None
    assert parameter_count(launch.model) == pytest.approx(8.03e9, rel=1e-3)
    assert launch.may_be_wrong == ()


CHANGED_SIZES = [
    (
        "run.sh",
        "torchrun --nproc-per-node=8 run_recipe.py --recipe llama3_8b_pretrain_config model.num_layers=2\n",
    ),
    ("run.sh", "nemo llm pretrain --factory llama3_8b model.config.num_layers=2\n"),
    ("run.py", "cfg = llama3_8b_pretrain_config()\nlayers = 2\ncfg.model.num_layers = layers\n"),
    (
        "run.py",
        "recipe = llm.llama3_8b.pretrain_recipe(num_nodes=1)\nrecipe.model.config.num_layers = 2\n",
    ),
]


@pytest.mark.parametrize(("name", "text"), CHANGED_SIZES)
def test_sizes_of_a_recipe_are_changed(name: str, text: str) -> None:
    """A model cut down to two layers is not the one that the recipe is named after."""
    plain = catalog.model("llama3-8b")
    launch = read(name, text, devices=8)
    assert launch.model is not None
    assert launch.model.name != plain.name
    cut = replace(plain, layers=2)
    assert parameter_count(launch.model) == parameter_count(cut) < 0.3 * parameter_count(plain)


def test_experts_and_embeddings_of_a_recipe_are_changed() -> None:
    command = (
        "torchrun --nproc-per-node=8 run_recipe.py --recipe qwen3_30b_a3b_pretrain_config CHANGE\n"
    )
    plain = catalog.model("qwen3-30b-a3b")
    assert isinstance(plain, Transformer)
    assert plain.experts is not None
    experts = replace(plain.experts, count=64, topk=2)
    changes = "model.num_moe_experts=64 model.moe_router_topk=2 model.share_embeddings_and_output_weights=true"
    net = read("run.sh", command.replace("CHANGE", changes), devices=8).model
    assert net is not None
    assert parameter_count(net) == parameter_count(
        replace(plain, experts=experts, tied_embeddings=True)
    )
    # The tokenizer of the data is no change of the model, nor is a size that is stated again.
    for change in (
        "model.num_layers=48",
        "tokenizer.tokenizer_type=NullTokenizer tokenizer.vocab_size=1024",
    ):
        assert read("run.sh", command.replace("CHANGE", change), devices=8).model == plain


def test_a_changed_size_that_nobody_can_read_is_refused() -> None:
    script = "cfg = llama3_8b_pretrain_config()\ncfg.model.num_layers = args.layers\n"
    with pytest.raises(LaunchFileError, match="num_layers"):
        read("run.py", script, devices=8)


NEMO_RECIPES = [
    ("llama31_70b", 70.55e9, (4, 4, 2, 1, 1, 1, 1), 512, 8192),
    ("mixtral_8x22b", 140.6e9, (2, 4, 2, 8, 8, 1, 1), 512, 4096),
    ("nemotron4_340b", 341.0e9, (8, 12, 2, 1, 32, 1, 1), 2304, 4096),
    ("gemma2_9b", 9.24e9, (8, 1, 1, 1, 1, 1, 2), 32, 4096),
    ("qwen3_8b", 8.19e9, (4, 1, 1, 1, 2, 1, 2), 32, 4096),
    ("deepseek_v2", 235.7e9, (1, 4, 1, 32, 32, 1, 1), 512, 4096),
    # Their embeddings are tied as Hugging Face has them, and not in NeMo's configuration.
    ("qwen2_500m", 494e6 + 151_936 * 896, (1, 1, 1, 1, 8, 1, 2), 32, 4096),
    ("starcoder2_3b", 3.030e9 + 49_152 * 3072, (2, 1, 1, 1, 4, 1, 2), 32, 4096),
]


@pytest.mark.parametrize(("name", "parameters", "layout", "global_batch", "seq_len"), NEMO_RECIPES)
def test_recipes_of_nemo(
    name: str, parameters: float, layout: tuple[int, ...], global_batch: int, seq_len: int
) -> None:
    launch = read("run.sh", f"nemo llm pretrain --factory {name}\n")
    assert launch.model is not None
    assert parameter_count(launch.model) == pytest.approx(parameters, rel=3e-3)
    assert (degrees(launch), launch.global_batch, launch.seq_len) == (layout, global_batch, seq_len)


def test_fine_tuning_recipes_of_megatron_bridge() -> None:
    command = (
        "torchrun --nproc-per-node=8 run_recipe.py --recipe llama3_8b_KIND_config peft.dim=16\n"
    )
    adapted = read("run.sh", command.replace("KIND", "peft"))
    assert (degrees(adapted), adapted.global_batch, adapted.seq_len) == (
        (1, 1, 1, 1, 8, 0, 1),
        8,
        4096,
    )
    assert (adapted.job_fields["frozen"], adapted.job_fields["adapter_rank"]) == (True, 16)
    whole = read("run.sh", command.replace("KIND", "sft").replace(" peft.dim=16", ""))
    assert degrees(whole)[:2] == (2, 1)
    assert "adapter_rank" not in whole.job_fields
    script = "from megatron.bridge.recipes.llama import *\ncfg = llama3_8b_peft_config()\ncfg.peft.dim = 4\n"
    assert read("run.py", script, devices=8).job_fields["adapter_rank"] == 4


@pytest.mark.slow
def test_every_recipe_names_a_model_and_is_read() -> None:
    """On as many devices as its degrees need, and without settings that nobody understands."""
    table = parse_toml((Path(recipes.__file__).parent / "recipes.toml").read_text())
    commands = [f"run_recipe.py --recipe {name}" for name in table["megatron-bridge"]]
    commands += [f"nemo llm pretrain --factory {name}" for name in table["nemo"]]
    for module, named in table["torchtitan"].items():
        commands += [
            f"torchrun -m torchtitan.train --module {module} --config {name}" for name in named
        ]
    for command in commands:
        launch = parse_launch(command + "\n", "run.sh", devices=1024)
        assert launch.model is not None, command
        assert launch.may_be_wrong == (), command
        assert launch.ignored == (), command
        assert launch.layout is not None or "devices are not a multiple" in "".join(
            launch.missing
        ), command


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_9b\n",
        ),
        ("run.sh", "nemo llm pretrain --factory llama9_8b\n"),
        ("run.py", "recipe = llm.llama9_8b.pretrain_recipe()\n"),
        ("run.sh", "torchrun run_recipe.py --recipe llama9_8b_pretrain_config\n"),
    ],
)
def test_a_recipe_that_is_not_known_is_refused_with_the_way_in(name: str, text: str) -> None:
    with pytest.raises(
        LaunchFileError,
        match=r"line 1: perfmodel knows no .* recipe named .*; known: .*llama3_8b.*perfmodel hook",
    ):
        parse_launch(text, name)


def test_a_tool_that_is_not_read_is_named() -> None:
    with pytest.raises(LaunchFileError, match="looks like litgpt"):
        parse_launch("litgpt pretrain --config config_hub/pretrain/tinyllama.yaml\n", "run.sh")


def test_a_file_of_primus_begins_with_others(tmp_path: Path) -> None:
    base = "modules:\n  pre_trainer:\n    framework: megatron\n    model: llama3.1_8B.yaml\n    overrides:\n"
    (tmp_path / "base.yaml").write_text(
        base + "      micro_batch_size: 4\n      global_batch_size: 128\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "extends:\n  - base.yaml\nmodules:\n  pre_trainer:\n    overrides:\n      micro_batch_size: 2\n"
    )
    launch = read_launch(tmp_path / "mine.yaml", devices=8)
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.global_batch, launch.seq_len) == (2, 128, 4096)
    assert launch.model is not None
    assert launch.model.name == "llama3-8b"


def test_primus_over_torchtitan() -> None:
    text = """
        modules:
          pre_trainer:
            framework: torchtitan
            model: llama3.1_8B-fp8.yaml
            overrides:
              training: {local_batch_size: "${PRIMUS_MBS:4}", seq_len: 8192}
              parallelism: {data_parallel_shard_degree: -1, tensor_parallel_degree: 2}
    """
    launch = read("run.yaml", text, devices=8)
    assert (degrees(launch), launch.seq_len) == ((2, 1, 1, 1, 4, 3, 4), 8192)
    assert launch.model is not None
    assert parameter_count(launch.model) == pytest.approx(8.03e9, rel=1e-3)


RUNNER = (
    "torchrun --nproc_per_node=8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config"
)
OPTIONS = "-tp 2 -cp 1 -mb 1 -gb 32 -sl 2048"
LONG_OPTIONS = (
    "--tensor_model_parallel_size=2 --context_parallel_size 1 --micro_batch_size 1 --global_batch_size=32 "
    "--seq_length 2048"
)
SETTINGS = (
    "model.tensor_model_parallel_size=2 model.context_parallel_size=1 train.micro_batch_size=1 "
    "train.global_batch_size=32 model.seq_length=2048 dataset.seq_length=2048"
)


@pytest.mark.parametrize("changes", [OPTIONS, LONG_OPTIONS, SETTINGS])
def test_options_of_the_runner_of_megatron_bridge_are_settings(changes: str) -> None:
    launch = read("run.sh", f"docker run -e NCCL_DEBUG=INFO img bash -lc '{RUNNER} {changes}'\n")
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.cp, launch.layout.micro_batch) == (2, 1, 1)
    assert (launch.devices, launch.global_batch, launch.seq_len) == (8, 32, 2048)
    assert launch.ignored == ()


def test_the_first_of_several_layouts_in_a_loop_is_read() -> None:
    text = f"""
        for config in "2,1" "1,2"; do
            IFS=',' read -r TP PP <<< "$config"
            {RUNNER} model.tensor_model_parallel_size=$TP model.pipeline_model_parallel_size=$PP
        done
    """
    launch = read("run.sh", text)
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.pp) == (2, 1)
    assert any("2 training commands" in note for note in launch.ignored)


def test_benchmarks_of_megatron_bridge_are_refused_with_what_to_give() -> None:
    text = "python scripts/performance/setup_experiment.py --gpu h100 -m llama3 -s 70b -ng 32 -gn 8 --task pretrain\n"
    with pytest.raises(
        LaunchFileError, match=r"scripts/performance/configs.*--devices 32.*perfmodel hook"
    ):
        read("run.sh", text)


PRIMUS_FILE = """
    modules:
      pre_trainer:
        framework: megatron
        model: llama3.1_70B.yaml
        overrides: {micro_batch_size: 2, global_batch_size: 256, tensor_model_parallel_size: "${TP:2}"}
"""
PRIMUS_STARTS = (
    "export NNODES=2\nexport EXP=examples/megatron/configs/MI300X/llama3.1_70B-BF16-pretrain.yaml\n"
    "bash ./examples/run_slurm_pretrain.sh FLAGS 2>&1 | tee log\n",
    "EXP=examples/megatron/configs/MI300X/llama3.1_70B-BF16-pretrain.yaml NNODES=2 "
    "bash examples/run_pretrain.sh FLAGS\n",
    "./runner/primus-cli slurm srun -N 2 -- container -- train pretrain --config "
    "examples/megatron/configs/MI300X/llama3.1_70B-BF16-pretrain.yaml FLAGS\n",
)


@pytest.mark.parametrize("start", PRIMUS_STARTS)
@pytest.mark.parametrize("is_beside", [True, False])
def test_commands_of_primus_change_its_file(tmp_path: Path, start: str, is_beside: bool) -> None:
    """Its own defaults are bf16, the distributed optimizer and sequence parallelism
    (`pre_trainer.yaml`, `language_model.yaml`)."""
    script = tmp_path / "run.sh"
    flags = '--micro_batch_size 4 --tensor_model_parallel_size "4" --num_layers 80 --mock_data True'
    script.write_text(start.replace("FLAGS", flags))
    if is_beside:
        (tmp_path / "llama3.1_70B-BF16-pretrain.yaml").write_text(PRIMUS_FILE)
    launch = read_launch(script, global_batch=256)
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.dp, launch.layout.micro_batch, launch.layout.zero) == (
        4,
        4,
        4,
        1,
    )
    assert (launch.layout.sequence_parallel, launch.devices, launch.global_batch) == (True, 16, 256)
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.model == catalog.model("llama3-70b")
    assert [("not found" in doubt) for doubt in launch.may_be_wrong] == (
        [] if is_beside else [True]
    )


def test_flags_of_primus_that_change_the_named_model_are_a_doubt() -> None:
    launch = read("run.sh", PRIMUS_STARTS[1].replace("FLAGS", "--num_layers 4 --fp8 hybrid"))
    assert any("num-layers-of-the-named-model" in doubt for doubt in launch.may_be_wrong)
    assert launch.job_fields["dtype"] == "fp8"
    by_name = read("run.sh", PRIMUS_STARTS[1].replace("FLAGS", "").replace("BF16", "FP8"))
    assert by_name.job_fields["dtype"] == "fp8"


@pytest.mark.parametrize(
    ("precision", "dtype", "recipe"),
    [
        ("bf16_mixed", "bf16", None),
        ("bf16_with_fp8_hybrid", "fp8", "delayed"),
        ("bf16_with_mxfp8_mixed", "fp8", "mxfp8"),
    ],
)
def test_precision_and_adapters_of_primus_on_megatron_bridge(
    precision: str, dtype: str, recipe: str | None
) -> None:
    text = f"""
        modules:
          post_trainer:
            framework: megatron_bridge
            model: llama2_70b_lora.yaml
            overrides: {{micro_batch_size: 1, global_batch_size: 8, peft: PEFT, precision_config: {precision},
                        sequence_parallel: false}}
    """
    adapted = read("run.yaml", text.replace("PEFT", "lora"), devices=8)
    whole = read("run.yaml", text.replace("PEFT", '"none"'), devices=8)
    assert (adapted.job_fields["dtype"], adapted.job_fields.get("fp8_recipe")) == (dtype, recipe)
    assert (adapted.job_fields["adapter_rank"], "adapter_rank" in whole.job_fields) == (32, False)
    assert adapted.model == whole.model == catalog.model("llama2-70b")
    assert any("peft" in doubt for doubt in adapted.may_be_wrong)
    assert whole.may_be_wrong == ()


NEMO_1 = """
    trainer: {devices: 8, num_nodes: 1, precision: bf16}
    model:
      mcore_gpt: true
      micro_batch_size: 1
      global_batch_size: 8
      encoder_seq_length: 4096
      num_layers: 4
      hidden_size: 1024
      ffn_hidden_size: 2816
      num_attention_heads: 8
      normalization: rmsnorm
      bias: false
      NAME: true
      activation: fast-swiglu
      position_embedding_type: rope
      override_vocab_size: 151936
"""


@pytest.mark.parametrize("name", ["qkv_bias", "add_qkv_bias"])
def test_biases_of_queries_in_nemo_1(name: str) -> None:
    """Its Qwen2 has biases in the projections of attention alone, under a name that Megatron-Core
    does not have."""
    launch = read("train.yaml", NEMO_1.replace("NAME", name))
    assert isinstance(launch.model, Transformer)
    assert launch.model.attention.qkv_bias
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_9b "
            "--parallelism.tensor_parallel_degree 2 --training.local_batch_size 3 --training.seq_len 1024\n",
        ),
        (
            "run.sh",
            "nemo llm pretrain --factory llama9_8b trainer.devices=8 trainer.num_nodes=1 "
            "trainer.strategy.tensor_model_parallel_size=2 data.micro_batch_size=3 data.global_batch_size=12 "
            "data.seq_length=1024\n",
        ),
        (
            "run.py",
            "recipe = llm.llama9_8b.pretrain_recipe(num_nodes=1, num_gpus_per_node=8, tensor_parallelism=2)\n"
            "recipe.data.micro_batch_size = 3\nrecipe.data.global_batch_size = 12\nrecipe.data.seq_length = 1024\n",
        ),
        (
            "run.sh",
            "torchrun --nproc_per_node 8 run_recipe.py --recipe llama9_8b_pretrain_config "
            "model.tensor_model_parallel_size=2 train.micro_batch_size=3 train.global_batch_size=12 "
            "model.seq_length=1024\n",
        ),
        (
            "run.py",
            "cfg = llama9_8b_pretrain_config()\ncfg.model.tensor_model_parallel_size = 2\n"
            "cfg.train.micro_batch_size = 3\ncfg.train.global_batch_size = 12\ncfg.model.seq_length = 1024\n",
        ),
    ],
)
def test_what_stands_beside_an_unknown_recipe_is_read_with_a_model(name: str, text: str) -> None:
    """All that the recipe itself sets is doubtful, and the answer begins with that."""
    launch = parse_launch(text, name, model="llama3-8b", devices=8)
    assert isinstance(launch.model, Transformer)
    assert (launch.model.name, launch.seq_len) == ("llama3-8b", 1024)
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.dp, launch.layout.micro_batch) == (2, 4, 3)
    doubt = launch.may_be_wrong[0]
    assert doubt.startswith("the layout, the batch and the precision may be wrong")


def test_a_script_that_makes_the_model_of_an_unknown_recipe_needs_none() -> None:
    text = (
        "cfg = llama9_8b_sft_config()\n"
        'cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").to_megatron_provider()\n'
        "cfg.train.micro_batch_size = 3\ncfg.train.global_batch_size = 12\n"
    )
    launch = parse_launch(text, "run.py", devices=4)
    assert launch.model is not None
    assert launch.model.name == "llama3.2-1b"
    assert "sft" not in launch.may_be_wrong[0]
    assert "recipe are not known" in launch.may_be_wrong[0]


@pytest.mark.parametrize("more", ["", " --activation_checkpoint.mode=selective"])
@pytest.mark.parametrize("config", ["llama3_8b", "llama3_70b"])
def test_selective_recompute_of_torchtitans_recipes_is_by_operator(config: str, more: str) -> None:
    """Since its configurations are in Python, whole layers are no longer repeated in turn."""
    launch = parse_launch(
        f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config {config}{more}\n",
        "run.sh",
    )
    assert launch.layout is not None
    is_full = config == "llama3_70b" and not more
    assert launch.layout.recompute == ("full" if is_full else "selective")
    assert launch.layout.recompute_full_layers is None
