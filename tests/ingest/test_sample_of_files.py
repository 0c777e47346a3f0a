"""Kinds of thing that a sample of public files says and that were read wrongly, each in a few lines
of text.

Names and numbers are others than in the files.
"""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.catalog import hub_names
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.spec import Transformer
from perfmodel.workload import parameter_count

TRAINER = "train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --bf16 True"


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), name, **given)


def transformer(launch: Launch) -> Transformer:
    assert isinstance(launch.model, Transformer)
    return launch.model


# --- numbers that depend on a list which only the machine knows
# ------------------------------------------


@pytest.mark.parametrize(
    "counting",
    [
        'IFS="," read -r -a LIST <<< "$CARDS"\nN=${#LIST[@]}',
        'IFS=, read -ra LIST <<< "$CARDS"; N=${#LIST[*]}',
        "LIST=($CARDS)\nN=${#LIST[@]}",
        "LIST=(${CARDS//,/ })\nN=${#LIST[@]}",
        "LIST=($(nvidia-smi -L))\nN=${#LIST[@]}",
        "mapfile -t LIST < <(nvidia-smi -L)\nN=${#LIST[@]}",
        "for card in ${CARDS//,/ }; do LIST+=($card); done\nN=${#LIST[@]}",
        "set -- $CARDS\nN=$#",
        "COMMAS=${CARDS//[^,]/}\nN=$((${#COMMAS} + 1))",
    ],
)
def test_a_count_of_unknown_words_is_unknown(counting: str) -> None:
    unknown = read("run.sh", f"{counting}\ntorchrun --nproc_per_node=$N {TRAINER}\n")
    assert (unknown.devices, unknown.layout) == (None, None)
    assert any("--devices" in text for text in unknown.missing)
    launch = read(
        "run.sh", f"CARDS=3,4,5\n{counting}\ntorchrun --nproc_per_node=$N {TRAINER}\n", devices=6
    )
    assert launch.devices == 6


@pytest.mark.parametrize(
    ("counting", "number"),
    [
        ('IFS="," read -r -a LIST <<< "$CARDS"\nN=${#LIST[@]}', 3),
        ('IFS="," read -r -a LIST <<< "${OTHERS:-0,1}"\nN=${#LIST[@]}', 2),
        ("LIST=(${CARDS//,/ })\nN=${#LIST[@]}", 3),
        ("COMMAS=${CARDS//[^,]/}\nN=$((${#COMMAS} + 1))", 3),
        # Quotes hold a value together, whatever it is.
        ('LIST=("$UNKNOWN" two)\nN=${#LIST[@]}', 2),
        ("LIST=()\nN=$((${#LIST[@]} + 4))", 4),
    ],
)
def test_a_count_of_known_words_is_a_number(counting: str, number: int) -> None:
    assert (
        read("run.sh", f"CARDS=3,4,5\n{counting}\ntorchrun --nproc_per_node=$N {TRAINER}\n").devices
        == number
    )


# --- arguments of other programs
# -------------------------------------------------------------------------


def test_an_argument_of_one_program_abbreviates_none_of_another() -> None:
    # `--model_id` is no short form of MS-Swift's `--model_id_or_path`, which would make the program
    # MS-Swift's.
    command = "deepspeed --num_gpus 2 tune.py --model_id meta-llama/Llama-3.1-8B --per_device_train_batch_size 3"
    launch = read("run.sh", f"{command} --deepspeed zero2.json --bf16 True --model_max_length 512")
    assert (launch.format, transformer(launch).name, launch.devices) == (
        "hf-trainer",
        "llama3-8b",
        2,
    )


@pytest.mark.parametrize(
    "starter", ["timeout --kill-after=9 60", "apptainer exec --nv --bind /a:/b image.sif", "env"]
)
def test_options_of_what_starts_a_front_end_are_none_of_its_own(starter: str) -> None:
    command = "swift sft --model Qwen/Qwen3-8B --train_type full --per_device_train_batch_size 1 --max_length 512"
    launch = read(
        "run.sh", f"{starter} torchrun --nproc_per_node 4 --standalone /opt/bin/{command}"
    )
    assert (launch.devices, launch.ignored, launch.may_be_wrong) == (4, (), ())


@pytest.mark.parametrize(
    "flags", ["--rank 32 --alpha 64", "--train_lora True", "--include_head_lora true", "--r 8"]
)
def test_adapters_by_other_names_are_doubted(flags: str) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 8 {TRAINER} {flags}")
    assert any(
        doubt.startswith("the training method may be wrong") for doubt in launch.may_be_wrong
    )


@pytest.mark.parametrize(
    "program", ["-m lora-gpt", "-m tools.qlora", "train_peft.py", "finetune-dora.py"]
)
def test_a_program_named_after_adapters_is_doubted_without_any(program: str) -> None:
    arguments = TRAINER.removeprefix("train.py")
    plain = read("run.sh", f"torchrun --nproc_per_node 8 {program}{arguments}")
    assert any("suggests adapters" in doubt for doubt in plain.may_be_wrong)
    with_adapters = read("run.sh", f"torchrun --nproc_per_node 8 {program}{arguments} --lora_r 8")
    assert with_adapters.may_be_wrong == ()
    assert with_adapters.job_fields["adapter_rank"] == 8


def test_lengths_of_prompt_and_answer_are_one_sequence() -> None:
    lengths = "--max_source_length 1024 --max_target_length 256"
    assert read("run.sh", f"torchrun --nproc_per_node 8 {TRAINER} {lengths}").seq_len == 1280
    # An encoder and a decoder share the first of them with many other programs.
    assert (
        read("run.sh", f"torchrun --nproc_per_node 8 {TRAINER} --max_source_length 1024").seq_len
        is None
    )


# --- files that are named and absent
# ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("llamafactory-cli train {}", "conf/full.yaml"),
        ("axolotl train {}", "conf/full.yml"),
        ("accelerate launch -m axolotl.cli.train {}", "full.yml"),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config {}", "mine.yaml"),
    ],
)
def test_an_absent_file_of_settings_makes_all_doubtful(command: str, file: str) -> None:
    launch = read("run.sh", command.format(file), model="llama3-8b", devices=2, global_batch=4)
    (doubt,) = launch.may_be_wrong
    assert doubt.startswith("everything that the command does not state may be wrong")
    assert file in doubt


LEVANTER = """
    data: !include data/mixture.yaml
    model: {type: llama, hidden_dim: 512, intermediate_dim: 2048, num_layers: 4, num_heads: 8, seq_len: 1024}
    trainer: {mp: "p=f32,c=bfloat16", train_batch_size: 64, per_device_parallelism: 2}
"""
LLAMA_HEADS = LEVANTER.replace("num_heads: 8", "num_heads: 8, num_kv_heads: 8")


def test_an_included_file_of_levanter(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(dedent(LLAMA_HEADS))
    absent = read_launch(file)
    assert any("a vocabulary of 50,257" in text for text in absent.assumed)
    assert any("data/mixture.yaml" in doubt for doubt in absent.may_be_wrong)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mixture.yaml").write_text("tokenizer: meta-llama/Meta-Llama-3-8B\n")
    present = read_launch(file)
    assert (transformer(present).vocab, present.may_be_wrong) == (128256, ())
    assert not any("vocabulary" in text for text in present.assumed)


@pytest.mark.parametrize("line", ["defaults: [other_model, _self_]", "base_config: my_base.yml"])
def test_an_absent_file_that_another_builds_on(line: str) -> None:
    text = f"{line}\nper_device_batch_size: 2\nici_fsdp_parallelism: 4\ndcn_data_parallelism: 1\n"
    launch = read("mine.yml", text, model="llama3-8b")
    assert any("was not found in the same folder" in doubt for doubt in launch.may_be_wrong)


def test_distillation_is_no_training_of_the_default_model() -> None:
    text = """
        teacher: {type: llama, hidden_dim: 512}
        student: {type: llama, hidden_dim: 256}
        trainer: {train_batch_size: 64, mp: "p=f32,c=bfloat16"}
    """
    with pytest.raises(LaunchFileError, match="distillation"):
        read("distill.yaml", text)


# --- models
# --------------------------------------------------------------------------------------------


def test_heads_of_a_changed_recipe_divide_its_changed_width() -> None:
    text = """
        from nemo.collections import llm
        import nemo_run as run
        recipe = llm.llama3_8b.pretrain_recipe(name="x", num_nodes=1, num_gpus_per_node=8)
        recipe.model.config.hidden_size = 1024
        recipe.model.config.ffn_hidden_size = 4096
        run.run(recipe)
    """
    assert transformer(read("run.py", text)).head_dim == 32
    # This family states the width of its heads.
    assert transformer(read("run.py", text.replace("llama3_8b", "qwen3_8b"))).head_dim == 128


def test_a_flavor_that_torchtitan_does_not_have_is_doubted() -> None:
    text = """
        [model]
        name = "{}"
        flavor = "{}"
        [training]
        local_batch_size = 2
    """
    strange = read("a.toml", text.format("DeepSeek", "v2"), devices=8)
    assert any(doubt.startswith("the model may be wrong") for doubt in strange.may_be_wrong)
    assert read("a.toml", text.format("llama3", "8B"), devices=8).may_be_wrong == ()


def test_layers_of_xglm_in_nanotron() -> None:
    text = """
        model:
          model_config: {hidden_size: 256, num_attention_heads: 4, num_hidden_layers: 3, intermediate_size: 1024,
            vocab_size: 1000, max_position_embeddings: 128, activation_function: gelu,
            sinusoidal_position_embedding: true, moe_num_experts: 4, num_experts_per_tok: 2, moe_glu: false}
        parallelism: {dp: 2, pp: 1, tp: 1, pp_engine: 1f1b, tp_mode: ALL_REDUCE}
        tokens: {micro_batch_size: 1, sequence_length: 128}
    """
    launch = read("x.yaml", text)
    model = transformer(launch)
    gate = read("x.yaml", text.replace("moe_glu: false", "moe_glu: true"))
    assert (model.block.gated_ffn, model.inputs.positions, model.norms.norm) == (
        False,
        "none",
        "layer_norm",
    )
    # A gate is one more matrix in each of four experts of three layers.
    assert parameter_count(transformer(gate)) - parameter_count(model) >= 3 * 4 * 256 * 1024


NEMO = """
    name: {}
    trainer: {{devices: 8, num_nodes: 1, precision: bf16}}
    model:
      {{micro_batch_size: 1, global_batch_size: 8, encoder_seq_length: 512, num_layers: 2, hidden_size: 256,
       num_attention_heads: 4, gated_linear_unit: true, add_bias_linear: false, vocab_size: 1000}}
"""


def test_words_of_megatron_core_in_nemo() -> None:
    launch = read("a.yaml", NEMO.format("megatron_gpt"))
    model = transformer(launch)
    assert (model.block.gated_ffn, model.block.bias, launch.may_be_wrong) == (True, False, ())


@pytest.mark.parametrize("name", ["megatron_griffin", "my_jamba_52b", "Mamba"])
def test_a_file_named_after_layers_that_it_does_not_state(name: str) -> None:
    assert any(name in doubt for doubt in read("a.yaml", NEMO.format(name)).may_be_wrong)


@pytest.mark.parametrize(
    ("key", "is_named"),
    [
        ("expert_glu: false", True),
        ("attention_norm: false", True),
        ("use_flash_kernel: false", False),
        ("expert_bias_enabled: off", True),
        ("hidden_cache: false", False),
        ("my_logging: false", False),
    ],
)
def test_a_false_that_takes_a_part_of_the_model_away_is_named(key: str, is_named: bool) -> None:
    text = dedent(NEMO.format("megatron_gpt")).replace(
        "vocab_size: 1000", f"vocab_size: 1000, {key}"
    )
    name = f"model.{key.partition(':')[0]}"
    assert any(name in text for text in read("a.yaml", text).ignored) is is_named


# --- layouts and precision
# ---------------------------------------------------------------------------------

MAXTEXT = "model_name: llama2-7b\nper_device_batch_size: 2\nici_fsdp_parallelism: 4\nici_tensor_parallelism: 2\n"


def test_slices_that_maxtext_leaves_to_the_machine_are_assumed() -> None:
    open_slices = read("a.yml", MAXTEXT + "dcn_data_parallelism: -1\n")
    assert (open_slices.devices, any("one slice" in text for text in open_slices.assumed)) == (
        8,
        True,
    )
    assert any("one slice" in text for text in read("a.yml", MAXTEXT).assumed)
    stated = read("a.yml", MAXTEXT + "dcn_data_parallelism: 3\n")
    assert (stated.devices, any("one slice" in text for text in stated.assumed)) == (24, False)


def test_maxtext_of_2023_in_8_bits() -> None:
    assert read("a.yml", MAXTEXT + "int8_training: true\n").job_fields["dtype"] == "int8"
    assert read("a.yml", MAXTEXT + "int8_training: false\n").job_fields["dtype"] == "bf16"


PRIMUS = """
    modules:
      pre_trainer:
        framework: torchtitan
        model: llama3.1_8B.yaml
        overrides:
          training: {{local_batch_size: 2, seq_len: 1024}}
          activation_checkpoint: {{mode: "{mode}"}}
          primus_turbo: {{enable_primus_turbo: true, use_turbo_float8_linear: {float8}}}
"""


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(("float8", "dtype"), [("true", "fp8"), ("false", "bf16")])
def test_torchtitan_under_primus(mode: str, float8: str, dtype: str) -> None:
    launch = read("a.yaml", PRIMUS.format(mode=mode, float8=float8), devices=8)
    assert launch.layout is not None
    assert (launch.layout.recompute, launch.job_fields["dtype"]) == (mode, dtype)


def test_composers_words_of_2022_for_precision() -> None:
    text = "global_train_batch_size: 8\nmax_seq_len: 512\nprecision: {}\n"
    assert read("a.yaml", text.format("bf16"), devices=4).job_fields["dtype"] == "bf16"
    assert read("a.yaml", text.format("amp_bf16"), devices=4).job_fields["dtype"] == "bf16"


def test_offload_by_the_name_of_an_absent_file_is_said() -> None:
    for name, said in (
        ("zero2_offload.json", "optimizer states"),
        ("z3_offload.json", "optimizer states and weights"),
    ):
        launch = read("run.sh", f"deepspeed --num_gpus 8 {TRAINER} --deepspeed conf/{name}")
        assert any(f"with {said} on the host" in text for text in launch.assumed)
    plain = read("run.sh", f"deepspeed --num_gpus 8 {TRAINER} --deepspeed conf/zero2.json")
    assert not any("on the host" in text for text in plain.assumed)


VERL = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_batch_size=64 data.max_length=512 "


def test_engines_of_verl() -> None:
    megatron = read(
        "run.sh",
        f"{VERL} model.path=Qwen/Qwen3-8B engine=megatron engine.tensor_model_parallel_size=2 "
        "+optim.override_optimizer_config.optimizer_cpu_offload=True "
        "+engine.override_transformer_config.recompute_granularity=selective",
    )
    assert megatron.layout is not None
    assert (megatron.layout.tp, megatron.layout.offload_states, megatron.layout.recompute) == (
        2,
        "optimizer",
        "selective",
    )
    automodel = read(
        "run.sh",
        f"{VERL} model.path=Qwen/Qwen3-30B-A3B engine=automodel engine.tp_size=2 engine.ep_size=4 "
        "engine.activation_checkpointing=False",
    )
    assert automodel.layout is not None
    assert (automodel.layout.tp, automodel.layout.ep, automodel.layout.recompute) == (2, 4, "none")


AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\nsequence_len: 512\nmicro_batch_size: 2\n"


def test_workers_of_ray_are_devices_of_axolotl() -> None:
    assert read("a.yml", f"{AXOLOTL}use_ray: true\nray_num_workers: 6\n").devices == 6
    assert read("a.yml", f"{AXOLOTL}use_ray: false\nray_num_workers: 6\n").devices is None


def test_a_strange_plugin_of_axolotl_is_doubted() -> None:
    launch = read("a.yml", f"{AXOLOTL}plugins: [my.integrations.OtherLoopPlugin]\n", devices=2)
    assert any("my.integrations.OtherLoopPlugin" in doubt for doubt in launch.may_be_wrong)
    known = f"{AXOLOTL}plugins: [axolotl.integrations.liger.LigerPlugin]\n"
    assert read("a.yml", known, devices=2).may_be_wrong == ()


# --- files that hold other files
# ----------------------------------------------------------------------------

TASK = """
    resources: {{accelerators: {accelerators}}}
    num_nodes: 3
    envs: {{BATCH: 4}}
    setup: pip install x
    run: |
      NODES=$(echo "$SKYPILOT_NODE_IPS" | wc -l)
      torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
        train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size $BATCH --bf16 True
"""


@pytest.mark.parametrize(("accelerators", "per_node"), [("H100:8", 8), ("L4", 1), ("{A100: 4}", 4)])
def test_a_task_of_skypilot(accelerators: str, per_node: int) -> None:
    launch = read("task.yaml", TASK.format(accelerators=accelerators))
    assert (launch.devices, launch.global_batch) == (3 * per_node, 3 * per_node * 4)


def test_a_task_without_training_says_so() -> None:
    with pytest.raises(LaunchFileError, match="task of SkyPilot run no training"):
        read("task.yaml", "resources: {accelerators: H100:8}\nrun: |\n  nvidia-smi\n")


@pytest.mark.parametrize(
    "head",
    ["%YAML 1.2\n---\n", "# mine\n%YAML 1.1\n\n# other\n---\n", "%TAG !x! tag:x:\r\n---\r\n"],
)
def test_directives_before_a_manifest(head: str) -> None:
    manifest = """
        apiVersion: batch/v1
        kind: Job
        spec:
          parallelism: 2
          template:
            spec:
              containers:
                - command: [torchrun, --nproc_per_node=8, train.py, --model_name_or_path, gpt2,
                            --per_device_train_batch_size, "1"]
                  resources: {limits: {nvidia.com/gpu: 8}}
    """
    assert read("job.yaml", head + dedent(manifest).lstrip()).devices == 16


# --- refusals
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "srun torchrun --nproc_per_node=8 ./mine.py --hidden_width 4096",
            "runs ./mine.py, whose arguments",
        ),
        (
            'ARGS="--num-layers 12 --hidden-size 768 --micro-batch-size 2"',
            "sets arguments of a training.*no program",
        ),
        (
            "MOE=(\n  --num-experts 8\n  --moe-router-topk 2\n)\nEP=1",
            "sets arguments of a training.*no program",
        ),
        (
            "llamafactory-cli train --stage sft --model_name_or_path $1 --cutoff_len 9 --finetuning_type full",
            "--model",
        ),
    ],
)
def test_refusals_say_what_the_script_lacks(text: str, reason: str) -> None:
    with pytest.raises(LaunchFileError, match=reason):
        read("run.sh", text)


def test_an_undefined_model_asks_for_the_flag_of_models() -> None:
    text = "llamafactory-cli train --stage sft --model_name_or_path $1 --cutoff_len 9 --finetuning_type full"
    with pytest.raises(LaunchFileError, match=r"or give --model$"):
        read("run.sh", text)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("//[^,]/", ",,"),
        ("//[!,]/", ",,"),
        ("//[0-9]/x", "x,x,xx"),
        ("/[,]/;", "1;2,31"),
        ("//?/.", "......"),
        ("//[12]*/", ""),
        ("//,/ ", "1 2 31"),
    ],
)
def test_patterns_of_replaced_parts(change: str, value: str) -> None:
    counted = f'CARDS=1,2,31\nX="${{CARDS{change}}}"\ntorchrun --nproc_per_node=$((${{#X}} + 1)) {TRAINER}\n'
    assert read("run.sh", counted).devices == len(value) + 1


@pytest.mark.parametrize(
    "end", ["", "/", "/snapshots", "/snapshots/0e9e39f249a16976918f6564b8830bc894c89659/"]
)
@pytest.mark.parametrize("start", ["", "/data/hub/", "~/.cache/huggingface/hub/"])
def test_folders_of_the_hubs_cache_are_models(start: str, end: str) -> None:
    """Their names have two dashes for the slash of an id."""
    assert hub_names(f"{start}models--meta-llama--Llama-3.1-8B-Instruct{end}") == hub_names(
        "meta-llama/Llama-3.1-8B-Instruct"
    )


@pytest.mark.parametrize(
    ("builder", "name"),
    [
        ("qwen3_moe.qwen3_moe_30b_a3b", "qwen3-30b-a3b"),
        ("qwen3_moe.qwen3_moe_30b_a3b_instruct", "qwen3-30b-a3b"),
        ("qwen3.lora_qwen3_8b_instruct", "qwen3-8b"),
    ],
)
def test_builders_of_torchtune_are_models(builder: str, name: str) -> None:
    recipe = f"""
        model: {{_component_: torchtune.models.{builder}}}
        optimizer: {{_component_: torch.optim.AdamW}}
        loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
        batch_size: 3
        dtype: bf16
    """
    assert read("run.yaml", recipe).model == pm.model(name)


# --- commands and files that do not train
# ----------------------------------------------------------------

EVALUATING = (
    "run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_eval_batch_size 8"
)
EVALUATES = "predicts or evaluates"


@pytest.mark.parametrize(
    "switch", ["--do_predict", "--do_eval", "--do_eval True", "--do_predict --do_train False"]
)
@pytest.mark.parametrize(
    "launcher", ["deepspeed --num_gpus=4", "accelerate launch --num_processes 4"]
)
def test_a_command_that_only_evaluates_is_refused(launcher: str, switch: str) -> None:
    with pytest.raises(LaunchFileError, match=EVALUATES):
        read(
            "run.sh",
            f"{launcher} {EVALUATING} {switch} --max_length 512 --dataset_name a --output_dir b",
        )


@pytest.mark.parametrize(
    "switch", ["do_predict: true", "do_eval: true", "do_eval: true\ndo_train: false"]
)
def test_a_file_that_only_evaluates_is_refused(switch: str) -> None:
    text = f"model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\ncutoff_len: 512\ntemplate: llama3\n{switch}\n"
    with pytest.raises(LaunchFileError, match=EVALUATES):
        parse_launch(text, "run.yaml")
    assert (
        parse_launch(text + "per_device_train_batch_size: 3\n", "run.yaml", devices=2).global_batch
        == 6
    )


def test_the_command_that_trains_is_read_beside_one_that_evaluates() -> None:
    """Though the latter has more arguments."""
    evaluating = f"deepspeed --num_gpus 2 {EVALUATING} --do_predict --max_length 512 --dataset_name a --bf16 True"
    launch = read("run.sh", f"{evaluating}\ndeepspeed --num_gpus 4 {TRAINER} --do_train\n")
    assert (launch.devices, launch.global_batch) == (4, 8)


def test_a_switch_beside_an_absent_file_of_settings_does_not_refuse() -> None:
    launch = read("run.sh", "llamafactory-cli train absent.yaml --do_eval true")
    assert any("absent.yaml" in doubt for doubt in launch.may_be_wrong)


# --- scripts that a command handles without running them
# -------------------------------------------------


@pytest.mark.parametrize(
    "handling",
    ["cp other.sh runs/", "chmod +x other.sh", "sudo mv other.sh b.sh", "git add other.sh"],
)
def test_a_script_that_is_copied_is_not_run(handling: str, tmp_path: Path) -> None:
    (tmp_path / "other.sh").write_text(
        f"torchrun --nproc_per_node 2 {TRAINER} --max_steps 3 --save_steps 1\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"{handling}\ntorchrun --nproc_per_node 8 {TRAINER}\n")
    launch = read_launch(script)
    assert launch.devices == 8
    assert not any("commands" in note for note in launch.ignored)


def test_a_script_that_copies_itself_has_one_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"cp $0 $WORK_DIR\ntorchrun --nproc_per_node 8 {TRAINER}\n")
    assert not any("commands" in note for note in read_launch(script).ignored)
