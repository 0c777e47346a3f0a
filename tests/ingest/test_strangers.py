"""Scripts in the shape of those that people really have: their sizes, degrees, lengths and
generation are read right.

`strangers/` holds small scripts written for these tests, one or more of every kind of fault that
was found in public scripts. Beside each stand its relatives: the same kind of thing said in other
ways.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, export_launch, parse_launch, read_launch, shape
from perfmodel.prediction import predict
from perfmodel.spec import Layout, Transformer
from perfmodel.workload import parameter_count

STRANGERS = Path(__file__).parent / "strangers"


class Facts(NamedTuple):
    """What a file says."""

    billions: float
    """Parameters."""
    devices: int
    layout: dict[str, Any]
    """Those of its settings that matter here."""
    seq_len: int
    dtype: str
    framework: str
    model: dict[str, Any] = {}  # noqa: RUF012


CORE, DEEPSPEED = "megatron-core", "megatron-deepspeed"
FACTS = {
    "k01a_srun_bash_c_single_quotes.sh": Facts(
        1.316, 32, {"tp": 2, "pp": 2, "dp": 8}, 2048, "fp16", CORE
    ),
    "k02a_array_inside_quotes.sh": Facts(
        1.291, 8, {"tp": 4, "sequence_parallel": True}, 8192, "bf16", CORE
    ),
    "k03a_sbatch_gpus_per_node.sh": Facts(1.316, 32, {"tp": 4, "dp": 8}, 2048, "bf16", CORE),
    "k04a_vocabulary_not_said.sh": Facts(
        8.030, 8, {"tp": 2}, 8192, "bf16", CORE, {"vocab": 128256}
    ),
    "k04b_vocabulary_not_said_nemo.yaml": Facts(
        8.030, 8, {"tp": 2}, 8192, "bf16", "nemo@2024", {"vocab": 128256}
    ),
    "k04c_vocabulary_padded.sh": Facts(7.616, 8, {"tp": 2}, 4096, "bf16", CORE, {"vocab": 152064}),
    "k05a_position_alibi.sh": Facts(
        7.069, 8, {"tp": 2}, 2048, "fp16", CORE, {"positions": "alibi"}
    ),
    "k06a_moe_layer_freq_list_times.sh": Facts(
        0.410, 8, {"ep": 4}, 4096, "bf16", CORE, {"stack": ("*E",) * 4}
    ),
    "k06b_moe_layer_freq_minus_one.sh": Facts(
        0.410, 8, {"ep": 4}, 4096, "bf16", CORE, {"stack": ("*E",) * 4}
    ),
    "k07a_deepspeed_moe.sh": Facts(
        13.149, 32, {"ep": 32}, 2048, "fp16", DEEPSPEED, {"stack": ("*-", "*E") * 12}
    ),
    "k07c_deepspeed_kv_heads.sh": Facts(
        1.194, 8, {"tp": 4}, 2048, "bf16", DEEPSPEED, {"kv_heads": 4}
    ),
    "k08a_quick_geglu.sh": Facts(1.676, 8, {"tp": 2}, 2048, "bf16", CORE, {"gated_ffn": True}),
    "k08c_glu_activation.sh": Facts(1.676, 8, {"tp": 2}, 2048, "bf16", CORE, {"gated_ffn": True}),
    "k09a_fork_moe_sizes.sh": Facts(15.577, 16, {"ep": 8}, 4096, "bf16", CORE),
    "k09c_lora_in_megatron.sh": Facts(6.738, 8, {"tp": 2}, 4096, "bf16", CORE),
    "k09d_hybrid_pattern_old.sh": Facts(7.606, 8, {"tp": 8}, 4096, "bf16", CORE),
    "k10a_bert_is_not_causal.sh": Facts(
        0.336, 8, {"dp": 8}, 512, "fp16", CORE, {"causal": False, "token_types": 2}
    ),
    "k11a_case_on_known_variable.sh": Facts(
        0.355, 8, {"dp": 8}, 1024, "bf16", CORE, {"layers": 24, "hidden": 1024}
    ),
    "k11b_sourced/run.sh": Facts(1.316, 8, {"tp": 2}, 2048, "bf16", CORE, {"layers": 24}),
    "k12a_flash_flag_makes_it_old.sh": Facts(0.754, 8, {"ep": 8, "zero": 1}, 4096, "bf16", CORE),
    "k12b_raw_python_message_mla.sh": Facts(0.730, 8, {"dp": 8}, 4096, "bf16", CORE),
    # Longer ones, each in the shape of a public example.
    "r01_sizes_by_condition.sh": Facts(
        7.616, 8, {"tp": 2, "zero": 1, "recompute": "selective"}, 4096, "bf16", CORE
    ),
    "r03_fork_with_latent_experts.sh": Facts(
        42.089,
        64,
        {"pp": 4, "ep": 16, "partition": (4, 4, 4, 2)},
        4096,
        "bf16",
        CORE,
        {"layers": 14},
    ),
    "r04_deepspeed_experts.sh": Facts(13.149, 64, {"ep": 64}, 2048, "fp16", DEEPSPEED),
    "r05_options_of_the_script.sh": Facts(
        1.236, 8, {"tp": 2, "zero": 1}, 8192, "bf16", CORE, {"layers": 16}
    ),
    "r06_sinks_and_windows.sh": Facts(
        0.339,
        8,
        {"ep": 4},
        4096,
        "bf16",
        CORE,
        {"window": 128, "full_attention_every": 2, "attention_sinks": True},
    ),
    "r07_mamba_by_scale.sh": Facts(0.907, 8, {"dp": 8}, 4096, "bf16", CORE, {"layers": 48}),
    "r08_encoder_and_decoder.sh": Facts(
        0.221,
        8,
        {"dp": 8},
        512,
        "bf16",
        CORE,
        {"decoder_layers": 12, "decoder_seq_len": 128, "vocab": 29096},
    ),
    "r09_mpiexec.sh": Facts(6.738, 16, {"tp": 4, "dp": 4}, 4096, "bf16", DEEPSPEED),
    "r12_experiments_by_case.sh": Facts(
        0.301,
        8,
        {"ep": 2, "micro_batch": 2, "zero": 1},
        2048,
        "bf16",
        CORE,
        {"stack": ("*-", *("*E",) * 7)},
    ),
    "r13_ranks_by_mpi.sh": Facts(
        0.132, 16, {"tp": 2, "pp": 2, "vpp": 2, "zero": 1}, 2048, "bf16", CORE
    ),
    "r10_two_stages.sh": Facts(1.318, 16, {"tp": 2, "dp": 8, "zero": 1}, 2048, "bf16", CORE),
}


def assert_says(launch: Launch, facts: Facts) -> None:
    """A file is read whole, without doubts, and as the facts have it."""
    assert launch.missing == ()
    assert launch.may_be_wrong == ()
    assert launch.layout is not None
    assert {key: launch.layout.value(key) for key in facts.layout} == facts.layout
    assert (launch.devices, launch.seq_len, launch.framework) == (
        facts.devices,
        facts.seq_len,
        facts.framework,
    )
    assert launch.job_fields["dtype"] == facts.dtype
    if facts.model:
        values = launch.model.values() | {"stack": launch.model.stack}
        assert {key: values[key] for key in facts.model} == facts.model
    assert launch.model is not None
    assert parameter_count(launch.model) / 1e9 == pytest.approx(facts.billions, abs=6e-4)


@pytest.mark.parametrize("name", FACTS)
def test_a_stranger_is_read_as_it_is(name: str) -> None:
    launch, facts = read_launch(STRANGERS / name), FACTS[name]
    assert_says(launch, facts)


CONFIGURED = {
    "k13a_megatron_arguments_yaml.yaml": Facts(
        0.055, 8, {"tp": 2, "pp": 2, "dp": 2}, 1024, "bf16", CORE
    ),
    "k13b_underscored_arguments_yaml.yaml": Facts(
        1.316, 8, {"tp": 2, "dp": 4, "zero": 1}, 2048, "bf16", CORE, {"layers": 24}
    ),
    "r11_neox.yml": Facts(
        0.162, 8, {"tp": 2, "dp": 4, "zero": 1, "micro_batch": 4}, 2048, "fp16", DEEPSPEED
    ),
    "k14a_nemo_fast_geglu.yaml": Facts(
        1.322, 8, {"tp": 2}, 2048, "bf16", "nemo@2023", {"gated_ffn": True, "activation": "gelu"}
    ),
    "k14d_nemo_reference_to_own_group.yaml": Facts(1.314, 8, {"tp": 2}, 16384, "bf16", "nemo@2023"),
    "k16b_key_twice.yaml": Facts(1.316, 8, {"tp": 2, "micro_batch": 2}, 2048, "bf16", "nemo@2023"),
    "k19a_titan_float8_old_key.toml": Facts(
        8.030, 16, {"dp": 16, "zero": 3}, 8192, "fp8", "torchtitan@2024"
    ),
    "k19b_titan_2024_degrees.toml": Facts(
        8.030, 16, {"tp": 2, "pp": 2, "dp": 4, "micro_batch": 4}, 8192, "bf16", "torchtitan@2024"
    ),
    "k19d_titan_flavour_known.toml": Facts(107.770, 64, {"dp": 64}, 8192, "bf16", "torchtitan"),
    "k19f_titan_accumulation.toml": Facts(
        8.030, 8, {"dp": 8, "micro_batch": 2}, 4096, "bf16", "torchtitan"
    ),
    "k20a_nanotron_expert_axis.yaml": Facts(
        0.498, 4, {"tp": 2, "dp": 2, "ep": 2}, 2048, "bf16", "nanotron"
    ),
    "k21a_llmfoundry_wrapped_variables.yaml": Facts(
        1.3201, 8, {"dp": 8}, 4096, "bf16", "llm-foundry"
    ),
    "k21b_llmfoundry_moe.yaml": Facts(
        0.338, 8, {"dp": 8}, 1024, "bf16", "llm-foundry", {"stack": ("*E",) * 4}
    ),
    "k22a_maxtext_replicas.yml": Facts(
        70.554, 64, {"dp": 64, "zero": 3, "replicate": 8}, 8192, "bf16", "maxtext"
    ),
    "k22b_maxtext_mla_dense_first.yml": Facts(
        15.114, 8, {"zero": 3}, 4096, "bf16", "maxtext", {"layers": 27}
    ),
    "k22c_maxtext_quantization.yml": Facts(6.738, 16, {"zero": 3}, 4096, "int8", "maxtext"),
    "k22f_maxtext_gemma2_layers.yml": Facts(
        9.242, 8, {"zero": 3}, 4096, "bf16", "maxtext", {"layers": 42, "full_attention_every": 2}
    ),
    "k22g_maxtext_base/mine.yml": Facts(
        0.618, 8, {"zero": 3, "dp": 8}, 2048, "bf16", "maxtext", {"layers": 8, "experts": None}
    ),
    "k22h_maxtext_command_line.sh": Facts(
        6.738, 16, {"zero": 3, "dp": 16}, 4096, "bf16", "maxtext"
    ),
}
"""Files of configurations, of the other frameworks."""
NOT_IN_THE_FILE = {
    "k13a_megatron_arguments_yaml.yaml": 8,
    "k13b_underscored_arguments_yaml.yaml": 8,
    "r11_neox.yml": 8,
    "k19a_titan_float8_old_key.toml": 16,
    "k19b_titan_2024_degrees.toml": 16,
}
"""Devices of those that do not say them."""


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_configuration_is_read_as_it_is(name: str) -> None:
    launch, facts = (
        read_launch(STRANGERS / name, devices=NOT_IN_THE_FILE.get(name)),
        CONFIGURED[name],
    )
    assert_says(launch, facts)


ARGUMENT_VALUES = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 512,
    "vocab_size": 32000,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "tensor_model_parallel_size": 2,
    "bf16": True,
    "swiglu": True,
    "ffn_hidden_size": 1024,
    "use_distributed_optimizer": True,
    "disable_bias_linear": True,
}
"""Arguments of Megatron, in every spelling of which a table of YAML is read the same."""


def _in_table(values: dict[str, Any], head: str, indent: int, name: Callable[[str], str]) -> str:
    lines = [f"{' ' * indent}{name(key)}: {str(value).lower()}" for key, value in values.items()]
    return "\n".join([head, *lines]) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        _in_table(ARGUMENT_VALUES, "MODEL_ARGS:", 2, lambda name: "--" + name.replace("_", "-")),
        _in_table(ARGUMENT_VALUES, "ENV_VARS:\n  A: 1\nMODEL_ARGS:", 2, lambda name: "--" + name),
        _in_table(
            ARGUMENT_VALUES, "modules:\n pre_trainer:\n  framework: megatron\n  overrides:", 3, str
        ),
        _in_table(
            ARGUMENT_VALUES,
            "experiment:\n  runner:\n    nnodes: 1\n    nproc_per_node: 8\nmodel:",
            2,
            str,
        ),
        _in_table(ARGUMENT_VALUES, "", 0, lambda name: name.replace("_", "-")),
        _in_table(
            {**ARGUMENT_VALUES, "disable_bias_linear": False, "add_bias_linear": False},
            "language_model:",
            2,
            str,
        ),
        _in_table(ARGUMENT_VALUES, "modules:\n pre_trainer:\n  overrides:", 3, str).replace(
            "micro_batch_size: 1", "micro_batch_size: ${NOBODY_SETS_THIS:1}"
        ),
    ],
)
def test_tables_of_arguments_are_read_as_command_lines(text: str) -> None:
    launch = parse_launch(text, "run.yaml", devices=8)
    arguments = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in ARGUMENT_VALUES.items()
    )
    command = parse_launch(f"torchrun --nproc_per_node 8 pretrain_gpt.py {arguments}", "run.sh")
    assert launch.ignored == ()
    assert shape(launch.model) == shape(command.model)
    layout = command.layout
    assert layout is not None
    # Primus shares sequences among tensor-parallel ranks unless a file says otherwise
    # (`language_model.yaml`).
    layout = layout.replace(sequence_parallel=True) if "overrides:" in text else layout
    assert (launch.layout, launch.global_batch, launch.seq_len) == (
        layout,
        command.global_batch,
        512,
    )
    assert launch.job_fields == command.job_fields


def test_a_recipe_of_primus_names_its_model() -> None:
    text = "modules:\n pre_trainer:\n  framework: megatron\n  model: ${NOBODY_SETS_THIS:llama2_7B}.yaml\n  overrides:\n"
    text += "   micro_batch_size: 2\n   global_batch_size: 64\n   tensor_model_parallel_size: 2\n   seq_length: 2048\n"
    launch = parse_launch(text, "run.yaml", devices=8)
    assert model(launch).name == "llama2-7b"
    assert (launch.seq_len, launch.job_fields["dtype"]) == (2048, "bf16")


NEOX = (STRANGERS / "r11_neox.yml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ('"norm": "layernorm"', '"norm": "rmsnorm"', "norm", "rms_norm"),
        ('"pos-emb": "rotary"', '"pos_emb": "alibi"', "positions", "alibi"),
        ('"no-weight-tying": true', '"no-weight-tying": false', "tied_embeddings", True),
        ('"gpt-j-residual": false', '"gpt_j_residual": true', "parallel_blocks", "two_norms"),
        ('"gpt-j-residual": false', '"mlp_type": "llama"', "ffn_hidden", 2048),
        ('"gpt-j-residual": false', '"activation": "swiglu"', "gated_ffn", True),
        ('"gpt-j-residual": false', '"intermediate_size": 4096', "ffn_hidden", 4096),
    ],
)
def test_models_of_gpt_neox(old: str, new: str, field: str, value: Any) -> None:
    assert old in NEOX
    launch = parse_launch(NEOX.replace(old, new), "run.yml", devices=8)
    assert launch.model.value(field) == value
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("new", "dtype"),
    [
        ('"precision": "bfloat16"', "bf16"),
        ('"bf16": {"enabled": true}', "bf16"),
        ('"precision": "fp16"', "fp16"),
        ('"fp16": {"enabled": true, "type": "bfloat16"}', "bf16"),
        ('"precision": "fp32"', "fp32"),
    ],
)
def test_precision_of_gpt_neox(new: str, dtype: str) -> None:
    text = NEOX.replace('"fp16": {"enabled": true}', new)
    for name in ("run.yml", "run.json"):
        launch = parse_launch(
            text if name == "run.yml" else json.dumps(yaml.safe_load(text)), name, devices=8
        )
        assert (launch.job_fields["dtype"], launch.framework) == (dtype, DEEPSPEED)


MAXTEXT = (STRANGERS / "k22c_maxtext_quantization.yml").read_text()
MAXTEXT_MODEL = (STRANGERS / "k22b_maxtext_mla_dense_first.yml").read_text()


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("int8", {"dtype": "int8"}),
        ("fp8", {"dtype": "fp8"}),
        ("fp8_full", {"dtype": "fp8"}),
        ("nanoo_fp8", {"dtype": "fp8"}),
        ("te_fp8_delayedscaling", {"dtype": "fp8", "fp8_recipe": "delayed"}),
        ("te_fp8_currentscaling", {"dtype": "fp8", "fp8_recipe": "current"}),
        ("te_mxfp8", {"dtype": "fp8", "fp8_recipe": "mxfp8"}),
        ("te_nvfp4", {"dtype": "fp4"}),
        ("''", {"dtype": "bf16"}),
    ],
)
def test_quantization_of_maxtext(name: str, job: dict[str, str]) -> None:
    launch = parse_launch(MAXTEXT.replace("quantization: int8", f"quantization: {name}"), "run.yml")
    assert {key: launch.job_fields[key] for key in job} == job
    assert launch.may_be_wrong == ()
    unknown = parse_launch(MAXTEXT.replace("quantization: int8", "quantization: int4w"), "run.yml")
    assert unknown.may_be_wrong == (
        "the precision may be wrong: perfmodel does not know quantization int4w",
    )


@pytest.mark.parametrize(
    ("degrees", "dp", "copies", "zero"),
    [
        ({"dcn_data_parallelism": 2, "ici_fsdp_parallelism": 16}, 32, 2, 3),
        (
            {"dcn_data_parallelism": 2, "dcn_fsdp_parallelism": 2, "ici_fsdp_parallelism": 8},
            32,
            2,
            3,
        ),
        (
            {"dcn_data_parallelism": 4, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
            32,
            8,
            3,
        ),
        ({"ici_data_parallelism": -1, "ici_fsdp_parallelism": 4}, 32, 8, 3),
        ({"ici_data_parallelism": 4, "ici_fsdp_parallelism": -1}, 32, 4, 3),
        ({"ici_data_parallelism": 32, "ici_fsdp_parallelism": 1}, 32, 1, 0),
    ],
)
def test_copies_of_shards_in_maxtext(
    degrees: dict[str, int], dp: int, copies: int, zero: int
) -> None:
    lines = "".join(f"{name}: {size}\n" for name, size in degrees.items())
    launch = parse_launch(
        MAXTEXT.replace("ici_fsdp_parallelism: 16\n", lines), "run.yml", devices=32
    )
    assert launch.layout is not None
    assert (launch.layout.dp, launch.layout.replicate, launch.layout.zero) == (dp, copies, zero)


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [
        ("custom\nmlpwi: remat\ndecoder_layer_input: device", "full"),
        ("custom\nmlpwi_0: device", "selective"),
        ("NONE", "none"),
        ("minimal_offloaded", "selective"),
        ("qkv_proj_offloaded", "full"),
        ("full", "full"),
    ],
)
def test_recompute_of_maxtext(policy: str, recompute: str) -> None:
    launch = parse_launch(
        MAXTEXT.replace("remat_policy: full", f"remat_policy: {policy}"), "run.yml"
    )
    assert launch.layout is not None
    assert launch.layout.recompute == recompute
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            "gemma3\nsliding_window_size: 512",
            {"window": 512, "full_attention_every": 6, "norm_at": "both"},
        ),
        (
            "gpt3\ntrainable_position_size: 4096",
            {"norm": "layer_norm", "positions": "learned", "bias": True},
        ),
        (
            "gpt_oss\nsliding_window_size: 128",
            {"window": 128, "attention_sinks": True, "layers": 21},
        ),
        ("llama4\nchunk_attn_window_size: 8192", {"window": 8192, "chunked_window": True}),
        ("mistral", {"window": 0, "layers": 21}),
        ("gemma2\nattn_logits_soft_cap: 50.0", {"attention_softcap": True, "layers": 42}),
    ],
)
def test_a_decoder_block_of_maxtext_decides_what_layers_are(
    block: str, said: dict[str, Any]
) -> None:
    text = (STRANGERS / "k22f_maxtext_gemma2_layers.yml").read_text()
    launch = parse_launch(
        text.replace("decoder_block: gemma2", f"decoder_block: {block}"), "run.yml"
    )
    assert {name: launch.model.value(name) for name in said} == said
    assert launch.may_be_wrong == ()


def test_maxtext_states_sizes_and_places_of_experts() -> None:
    experts = model(parse_launch(MAXTEXT_MODEL, "run.yml")).experts
    assert experts is not None
    assert (experts.ffn_hidden, experts.shared_ffn_hidden, experts.first_dense_layers) == (
        1408,
        5632,
        3,
    )
    text = MAXTEXT_MODEL.replace(
        "first_num_dense_layers: 3", "interleave_moe_layer_step: 3"
    ).replace("mla", "global")
    found = model(parse_launch(text, "run.yml"))
    assert found.experts is not None
    assert (found.experts.every, found.latent_attention) == (3, None)
    unread = parse_launch(
        MAXTEXT_MODEL.replace("decoder_block: deepseek", "decoder_block: qwen3_next"), "run.yml"
    )
    assert "decoder_block qwen3_next" in unread.may_be_wrong[0]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("deepseek2-16b", "deepseek-v2-lite"),
        ("llama4-17b-16e", "llama-4-scout"),
        ("gemma2-9b", "gemma-2-9b"),
        ("deepseek3-671b", "deepseek-v3"),
        ("llama3.1-70b", "llama3-70b"),
        ("phi4", "phi-4"),
    ],
)
def test_names_of_maxtext(name: str, known: str) -> None:
    assert model(parse_launch(MAXTEXT.replace("llama2-7b", name), "run.yml")).name == known


def test_errors_of_an_included_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text("steps: 10\nbase_emb_dim: wide\n")
    (tmp_path / "run.yml").write_text(f"base_config: base.yml\n{MAXTEXT}")
    with pytest.raises(LaunchFileError, match=r"base\.yml, line 2: base_emb_dim must be"):
        read_launch(tmp_path / "run.yml")


@pytest.mark.parametrize(
    "line",
    [
        "python3 MaxText/train.py MaxText/configs/base.yml {settings}",
        "JAX_PLATFORMS=tpu python3 -m MaxText.train MaxText/configs/base.yml \\\n  {settings}",
        'xpk workload create --cluster c --command "bash setup.sh; python3 -m MaxText.train base.yml {settings}"',
        "export NAME=run\npython3 -m maxtext.trainers.train base.yml run_name=$NAME {settings}",
    ],
)
def test_command_lines_of_maxtext(line: str) -> None:
    settings = "model_name=llama2-7b per_device_batch_size=4 ici_fsdp_parallelism=8 ici_tensor_parallelism=2 "
    settings += "max_target_length=4096 quantization=int8"
    launch = parse_launch(line.format(settings=settings) + "\n", "run.sh")
    assert launch.layout is not None
    assert (launch.format, launch.devices, launch.layout.tp, launch.layout.zero) == (
        "maxtext",
        16,
        2,
        3,
    )
    assert (launch.seq_len, launch.job_fields["dtype"], model(launch).name) == (
        4096,
        "int8",
        "llama2-7b",
    )


def accelerated(name: str, *replaced: tuple[str, str]) -> Launch:
    """A file of Accelerate's with some of its text replaced, for a model of 8 B parameters."""
    text = (STRANGERS / name).read_text()
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return parse_launch(text, str(STRANGERS / name), model="llama3-8b", global_batch=64)


def test_a_file_of_deepspeed_beside_accelerates_is_followed() -> None:
    name = "k23a_accelerate_ds_file/run.yaml"
    launch = accelerated(name)
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.micro_batch, launch.layout.offload_states) == (
        3,
        2,
        "optimizer",
    )
    assert (launch.devices, launch.job_fields["dtype"], launch.framework) == (
        8,
        "bf16",
        "deepspeed",
    )
    assert launch.may_be_wrong == ()
    assert (
        parse_launch(
            (STRANGERS / name).read_text(), str(STRANGERS / name), model="llama3-8b"
        ).global_batch
        == 64
    )
    elsewhere = accelerated(name, ("zero3.json", "/home/somebody/configs/zero3.json"))
    assert elsewhere.layout == launch.layout
    missing = accelerated(name, ("zero3.json", "nobody.json"))
    assert (
        "deepspeed_config_file nobody.json was not found in the same folder"
        in missing.may_be_wrong[0]
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_precision_that_a_file_of_deepspeed_leaves_open_is_accelerates(
    dtype: str, tmp_path: Path
) -> None:
    both = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(both))
    text = (
        (STRANGERS / "k23a_accelerate_ds_file/run.yaml")
        .read_text()
        .replace("zero3.json", "ds.json")
    )
    (tmp_path / "run.yaml").write_text(
        f"{text}mixed_precision: {dtype}\ngradient_accumulation_steps: 4\n"
    )
    launch = read_launch(tmp_path / "run.yaml", model="llama3-8b")
    assert launch.layout is not None
    assert (launch.job_fields["dtype"], launch.layout.zero, launch.global_batch) == (dtype, 2, 32)


@pytest.mark.parametrize(
    ("value", "zero"),
    [
        ("true", 3),
        ("false", 2),
        ("FULL_SHARD", 3),
        ("SHARD_GRAD_OP", 2),
        ("NO_SHARD", 0),
        ("1", 3),
        ("2", 2),
    ],
)
def test_words_of_fsdp2(value: str, zero: int) -> None:
    launch = accelerated(
        "k23b_accelerate_hsdp.yaml",
        ("after_forward: true", f"after_forward: {value}"),
        ("replicate_size: 2", "replicate_size: 1"),
        ("shard_size: 8", "shard_size: 16"),
    )
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.replicate) == (zero, 1)


@pytest.mark.parametrize(
    ("copies", "shards", "zero", "replicate"),
    [(2, 8, 3, 2), (4, 4, 3, 4), (1, 16, 3, 1), (16, 1, 0, 1)],
)
def test_copies_of_shards_in_accelerate(
    copies: int, shards: int, zero: int, replicate: int
) -> None:
    launch = accelerated(
        "k23b_accelerate_hsdp.yaml",
        ("replicate_size: 2", f"replicate_size: {copies}"),
        ("shard_size: 8", f"shard_size: {shards}"),
    )
    assert launch.layout is not None
    assert (launch.layout.dp, launch.layout.zero, launch.layout.replicate) == (16, zero, replicate)
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("ranks", "by_heads", "kind"),
    [
        (1, 8, "ulysses"),
        (1, 4, "ulysses"),
        (2, 1, "all_gather"),
        (4, 1, "all_gather"),
        (1, 1, Layout().cp_kind),
    ],
)
def test_context_parallelism_of_accelerate(ranks: int, by_heads: int, kind: str) -> None:
    """How keys and values are exchanged counts where a sequence is divided."""
    exchanged = (
        "cp_size: 1",
        f"cp_size: {ranks}\n  parallelism_config_cp_comm_strategy: allgather",
    )
    launch = accelerated(
        "k23d_accelerate_sp.yaml", exchanged, ("sp_size: 8", f"sp_size: {by_heads}")
    )
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.cp_kind, launch.layout.zero) == (
        ranks * by_heads,
        kind,
        3,
    )
    assert launch.layout.dp == 8 // (ranks * by_heads)
    assert launch.may_be_wrong == ()


TORN = {
    "litgpt": "out_dir: x\ntrain:\n  micro_batch_size: 4\n  global_batch_size: 8\neval:\n  interval: 10\n",
    "NeMo Automodel": "step_scheduler:\n  global_batch_size: 8\nmodel:\n  _target_: x\nddp:\n  x: 1\n",
    "flash-attention": "train:\n  gpu_mem: 80\n  global_batch_size: 256\ndatamodule:\n  batch_size: 8\n",
    "maxdiffusion": "pretrained_model_name_or_path: x\nici_fsdp_parallelism: 4\nper_device_batch_size: 1\n",
    "OLMo": "global_train_batch_size: 8\ndevice_train_microbatch_size: 2\ntokenizer:\n  identifier: x\n",
    "llm-foundry before MPT": "global_train_batch_size: 8\nmodel:\n  mlp_ratio: 4\n  attn_impl: flash\n",
    "verl": "actor_rollout_ref:\n  actor:\n    megatron:\n      tensor_model_parallel_size: 2\n"
    "      pipeline_model_parallel_size: 2\n      context_parallel_size: 1\n      expert_model_parallel_size: 1\n",
}


@pytest.mark.parametrize("tool", TORN)
def test_files_of_tools_that_are_not_read_name_the_tool(tool: str) -> None:
    with pytest.raises(
        LaunchFileError,
        match=rf"looks like .*{tool}.*, which perfmodel does not read; give --model",
    ):
        parse_launch(TORN[tool], "run.yaml")


def test_a_file_of_litgpt_is_not_megatron_bridges() -> None:
    with pytest.raises(LaunchFileError, match="looks like litgpt, which perfmodel does not read"):
        read_launch(STRANGERS / "k15a_litgpt_is_not_bridge.yaml")


def test_a_config_of_a_model_is_no_launch_file() -> None:
    config = (
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 8}'
    )
    with pytest.raises(
        LaunchFileError, match=r"the config of a Hugging Face model; give it with --model"
    ):
        parse_launch(config, "config.json")


def deepspeed(name: str, **changed: Any) -> Launch:
    """A file of DeepSpeed's with keys of its ZeRO replaced, for a model of 8 B parameters."""
    config = json.loads((STRANGERS / name).read_text())
    config["zero_optimization"] |= changed
    return parse_launch(json.dumps(config), "ds.json", model="llama3-8b", devices=8, seq_len=2048)


def test_optimizer_states_in_16_bits() -> None:
    narrow = deepspeed("k18a_ds_bf16_masters.json")
    assert (narrow.job_fields["optimizer"], narrow.job_fields["grad_dtype"]) == (
        "adam16bit",
        "bf16",
    )
    assert narrow.may_be_wrong == ()
    plain = parse_launch(
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}',
        "ds.json",
        model="llama3-8b",
        devices=8,
        seq_len=2048,
    )
    assert narrow.layout is not None
    assert plain.layout is not None
    saved = predict_memory(plain) - predict_memory(narrow)
    # a master of 4 bytes, and 4 instead of 8 of moments
    assert saved == pytest.approx(8.03e9 * 8 / 8, rel=0.05)


def predict_memory(launch: Launch) -> float:
    """Bytes that a device needs."""
    assert launch.layout is not None
    return float(predict(launch.problem("dgx-h100"), layout=launch.layout).memory.peak)


@pytest.mark.parametrize(
    ("changed", "offloaded"),
    [
        ({"cpu_offload": True}, "optimizer"),
        ({"cpu_offload": False}, "none"),
        ({"cpu_offload_params": True}, "weights"),
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"cpu_offload": True, "offload_param": {"device": "cpu"}}, "weights"),
    ],
)
def test_states_of_deepspeed_on_the_host(changed: dict[str, Any], offloaded: str) -> None:
    launch = deepspeed("k17a_ds_precision_auto.json", **changed)
    assert launch.layout is not None
    assert (launch.layout.offload_states, launch.job_fields["dtype"]) == (offloaded, "bf16")
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("stage", "changed", "elements"),
    [
        (
            1,
            {"reduce_bucket_size": 1.26e9, "allgather_bucket_size": 1.26e9, "overlap_comm": True},
            3.78e9,
        ),
        (2, {"reduce_bucket_size": 2e8, "allgather_bucket_size": 3e8, "overlap_comm": False}, 5e8),
        (2, {"reduce_bucket_size": 2e8}, 7e8),
        (
            2,
            {"reduce_bucket_size": "auto", "allgather_bucket_size": 2e8, "overlap_comm": True},
            1.2e9,
        ),
        (3, {"reduce_bucket_size": 5e8, "overlap_comm": True}, 5e8),
        (2, {"reduce_bucket_size": "auto"}, None),
        (2, {}, None),
    ],
)
def test_buckets_of_deepspeed_take_memory(
    stage: int, changed: dict[str, Any], elements: float | None
) -> None:
    launch = deepspeed("k17a_ds_precision_auto.json", stage=stage, **changed)
    if elements is None:
        assert "bucket_bytes" not in launch.job_fields
        return
    assert launch.job_fields["bucket_bytes"] == pytest.approx(2 * elements)
    usual = deepspeed("k17a_ds_precision_auto.json", stage=stage)
    # Of the framework, where a file says nothing: stage 3 has the bucket of reductions alone.
    buffered = 2e9 if stage < 3 else 1e9
    assert predict_memory(launch) - predict_memory(usual) == pytest.approx(
        2 * elements - buffered, abs=1e8
    )


def test_buckets_stay_in_a_file_that_is_written_like_another(tmp_path: Path) -> None:
    usual = json.loads((STRANGERS / "k18d_ds_buckets.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps(usual))
    launch = read_launch(tmp_path / "ds.json", model="llama3-8b", devices=96)
    assert launch.layout is not None
    job = launch.problem("dgx-a100").job
    assert job.gradients.bucket_bytes == pytest.approx(3.78e9 * 2)
    written = export_launch(
        launch.layout, "deepspeed", model=launch.model, job=job, like=tmp_path / "ds.json"
    )
    zero = json.loads(written)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 1260000000


def test_zero_plus_plus_is_named_at_the_head() -> None:
    launch = deepspeed("k18c_ds_hpz.json")
    (quantised,) = launch.may_be_wrong
    assert "zero_quantized_weights and zero_quantized_gradients" in quantised
    assert launch.job_fields["secondary_shards"] == 8
    assert deepspeed("k17a_ds_precision_auto.json", zero_hpz_partition_size=1).may_be_wrong == ()


def test_batches_that_accumulate_are_whole() -> None:
    """8 shards of 2 sequences, accumulated 8 times."""
    assert read_launch(STRANGERS / "k19f_titan_accumulation.toml").global_batch == 128


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("${multiply:2,1024}", 2048),
        ("${sum:1024,1024}", 2048),
        ("${divide_ceil:4095,2}", 2048),
        ("${divide_floor:4097,2}", 2048),
        ("${subtract:4096,2048}", 2048),
        ("${.max_position_embeddings}", 2048),
        ("${model.max_position_embeddings}", 2048),
        ("${training.model.max_position_embeddings}", 2048),
        ("${conf.training.model.max_position_embeddings}", 2048),
    ],
)
def test_references_of_nemo_are_computed(reference: str, value: int) -> None:
    text = (STRANGERS / "k16b_key_twice.yaml").read_text()
    assert "encoder_seq_length: 2048" in text
    changed = text.replace("encoder_seq_length: 2048", f"encoder_seq_length: {reference}")
    assert parse_launch(changed, "run.yaml").seq_len == value


@pytest.mark.parametrize("section", ["training", "experimental", "parallelism"])
def test_degrees_of_torchtitan_stand_under_every_section_that_had_them(section: str) -> None:
    text = (STRANGERS / "k19a_titan_float8_old_key.toml").read_text().partition("[experimental]")[0]
    text = text.replace("batch_size = 1", "batch_size = 8")
    degrees = {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}
    lines = "\n".join(f"{name} = {degree}" for name, degree in degrees.items())
    text = f"{text}{lines}\n" if section == "training" else f"{text}[{section}]\n{lines}\n"
    launch = parse_launch(text, "run.toml", devices=16)
    assert launch.layout is not None
    assert (launch.layout.pp, launch.layout.cp, launch.layout.dp) == (2, 2, 4)


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("[float8]\nenable_float8_linear = true", "fp8"),
        ("[float8]\nenable_float8_linear = false", "bf16"),
        ("[model.extra]\n[float8]", "bf16"),
    ],
)
def test_float8_of_torchtitan_is_a_switch(lines: str, dtype: str) -> None:
    text = (STRANGERS / "k19a_titan_float8_old_key.toml").read_text().partition("[float8]")[0]
    assert (
        parse_launch(f"{text}{lines}\n", "run.toml", devices=16).job_fields.get("dtype", "bf16")
        == dtype
    )


def test_adapters_of_configurations_freeze_the_rest() -> None:
    titan = (
        STRANGERS / "k19f_titan_accumulation.toml"
    ).read_text() + "[lora]\nrank = 16\nalpha = 32.0\n"
    assert parse_launch(titan, "run.toml").job_fields["adapter_rank"] == 16
    foundry = (STRANGERS / "k21b_llmfoundry_moe.yaml").read_text()
    peft = "  peft_config:\n    peft_type: LORA\n    r: 8\nglobal_train_batch_size"
    job = parse_launch(foundry.replace("global_train_batch_size", peft, 1), "run.yaml").job_fields
    assert (job["frozen"], job["adapter_rank"]) == (True, 8)


def test_a_launcher_and_a_command_in_exported_variables() -> None:
    launch = read_launch(STRANGERS / "r02_quoted_launcher.slurm")
    assert launch.layout is not None
    assert (launch.devices, launch.layout.tp, launch.layout.pp, launch.layout.dp) == (128, 4, 4, 8)
    assert (launch.global_batch, launch.layout.recompute, model(launch).vocab) == (
        512,
        "full",
        250880,
    )
    # Stages of embeddings counted as layers are not read.
    assert launch.may_be_wrong == (
        "the layout may be wrong: --pp-partition-method type:transformer|embedding cuts 40 layers into 4 stages "
        "that perfmodel does not work out; --layout partition=... sets them",
    )


def test_scripts_with_arguments_of_their_own() -> None:
    path = STRANGERS / "r05_options_of_the_script.sh"
    launch = read_launch(f"{path} --model-size 8b --tp=4 --nodes 2 -- --recompute-activations")
    assert launch.layout is not None
    assert (launch.devices, launch.layout.tp, model(launch).layers) == (16, 4, 32)
    assert launch.layout.recompute == "selective"
    launch = read_launch(
        f"{STRANGERS / 'r01_sizes_by_condition.sh'} dsw 0.5B 2 32 2048 fp16 1 1 full false"
    )
    assert launch.layout is not None
    assert (launch.job_fields["dtype"], launch.layout.zero, launch.layout.recompute) == (
        "fp16",
        0,
        "full",
    )
    assert (model(launch).hidden, launch.seq_len, launch.global_batch) == (896, 2048, 32)


def test_adapters_freeze_the_rest() -> None:
    launch = read_launch(STRANGERS / "k09c_lora_in_megatron.sh")
    assert (launch.job_fields["frozen"], launch.job_fields["adapter_rank"]) == (True, 16)
    assert {"linear_fc1", "linear_fc2"} <= set(launch.job_fields["adapter_modules"])


def test_arguments_of_a_script_stand_behind_its_name() -> None:
    path = STRANGERS / "k11c_positional_parameters.sh"
    with pytest.raises(
        LaunchFileError, match=r"nproc-per-node is '\$\{1\}'.* after its name.* --devices"
    ):
        read_launch(path)
    for call in (f"{path} 8 24 2", f"bash {path} 8 24 2", f"NOBODY=1 {path} 8 24 2"):
        launch = read_launch(call)
        assert launch.layout is not None
        assert (launch.devices, launch.layout.micro_batch) == (8, 2)
        assert isinstance(launch.model, Transformer)
        assert launch.model.layers == 24
    launch = read_launch(path, devices=8, model="gpt3-1.3b", layout="micro_batch=2")
    assert launch.layout is not None
    assert (launch.devices, launch.layout.micro_batch) == (8, 2)


def test_what_matters_is_not_hidden_by_noise() -> None:
    launch = read_launch(STRANGERS / "k30a_noise_hides_what_matters.sh")
    assert launch.ignored == ()
    assert isinstance(launch.model, Transformer)
    assert launch.layout is not None
    assert (launch.model.layers, launch.layout.cp, launch.job_fields["adapter_rank"]) == (22, 2, 8)


# The relatives of each kind.

SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
BATCH = "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --bf16"
TRAIN = f"pretrain_gpt.py {SIZES} {BATCH}"


def launched(
    arguments: str = "", before: str = "torchrun --nproc_per_node 8", program: str = TRAIN
) -> Launch:
    return parse_launch(f"{before} {program} {arguments}\n", "run.sh")


def model(launch: Launch) -> Transformer:
    assert isinstance(launch.model, Transformer)
    return launch.model


SBATCH = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
WORLDS = {
    # Kind 1: what srun really runs.
    "double quotes": (
        SBATCH + f'L="torchrun --nproc_per_node 8 --nnodes 4"\nsrun bash -c "$L {TRAIN}"',
        32,
    ),
    "options of bash": (
        SBATCH + f"srun --label bash -lc 'torchrun --nproc_per_node 8 --nnodes 4 {TRAIN}'",
        32,
    ),
    "sh": (
        SBATCH + f"export T='torchrun --nproc_per_node 4 --nnodes 4 {TRAIN}'\nsrun sh -c '$T'",
        16,
    ),
    "an echo is no launch": (
        SBATCH
        + f'CMD="torchrun --nproc_per_node 8 --nnodes 4 {TRAIN}"\necho "torchrun --nproc_per_node 1 {TRAIN}"\n'
        'srun bash -c "$CMD"',
        32,
    ),
    "a container between": (
        SBATCH
        + "srun --container-image=x.sqsh bash -c 'cd /x && export A=1; torchrun --nproc_per_node 8 --nnodes "
        f"$SLURM_NNODES {TRAIN}'",
        32,
    ),
    "gres where no launcher says it": (SBATCH + f"srun python {TRAIN}", 32),
    "tasks where srun starts every process": (
        "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n" + f"srun python {TRAIN}",
        32,
    ),
    "options of srun win": (SBATCH + f"srun --nodes=2 --ntasks-per-node=8 python {TRAIN}", 16),
    "tasks in all": ("#SBATCH --ntasks=16\n" + f"srun python {TRAIN}", 16),
    "mpirun": (f"mpirun -np 16 --map-by ppr:8:node python {TRAIN}", 16),
    "ssh": (f'ssh host0 "cd /x && torchrun --nproc_per_node 8 --nnodes 2 {TRAIN}"', 16),
    "here-document of sbatch": (f"sbatch <<EOF\n{SBATCH}srun python {TRAIN}\nEOF", 32),
    "elastic nodes": (f"torchrun --nnodes 1:4 --nproc_per_node 8 {TRAIN}", 32),
    "all GPUs of a node": (SBATCH + f"srun torchrun --nnodes 4 --nproc_per_node gpu {TRAIN}", 32),
    "accelerate": (f"accelerate launch --num_processes 16 --num_machines 2 {TRAIN}", 16),
    "a path that nobody set": (f"torchrun --nproc_per_node 8 ${{HOME_OF_CODE}}/{TRAIN}", 8),
    "a launcher that is a program": (
        f"python -u launch.py --nproc_per_node 8 --nnodes 2 {TRAIN}",
        16,
    ),
    # Kind 3: variables that SLURM sets.
    "nodes": (
        "#SBATCH -N 4\n" + f"torchrun --nproc_per_node 8 --nnodes $SLURM_JOB_NUM_NODES {TRAIN}",
        32,
    ),
    "on the node": (
        SBATCH
        + f"torchrun --nproc_per_node $SLURM_GPUS_ON_NODE --nnodes ${{SLURM_NNODES}} {TRAIN}",
        32,
    ),
    "typed GPUs": (
        "#SBATCH --nodes 2\n#SBATCH --gpus-per-node=h100:4\n"
        f"torchrun --nproc_per_node $SLURM_GPUS_PER_NODE --nnodes $SLURM_NNODES {TRAIN}",
        8,
    ),
    "typed gres": ("#SBATCH -N2\n#SBATCH --gres=gpu:a100:4\n" + f"srun python {TRAIN}", 8),
    "product": (
        SBATCH + "W=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))\n"
        f"torchrun --nproc_per_node $((W / SLURM_NNODES)) --nnodes $SLURM_NNODES {TRAIN}",
        32,
    ),
    "names of nodes counted": (
        SBATCH + "N=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\n"
        f"torchrun --nproc_per_node 8 --nnodes $N {TRAIN}",
        32,
    ),
    "a default wins where SLURM sets nothing": (
        f"torchrun --nproc_per_node ${{SLURM_GPUS_ON_NODE:-4}} {TRAIN}",
        4,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_devices_are_those_that_run(name: str) -> None:
    text, devices = WORLDS[name]
    launch = parse_launch(text + "\n", "run.sh")
    assert launch.devices == devices
    assert not any("guess" in line for line in launch.assumed)


def test_several_trainings_in_a_script_are_named() -> None:
    command = f"torchrun --nproc_per_node 8 {TRAIN}"
    launch = parse_launch(f"{command}\n{command} --tensor-model-parallel-size 2\n", "run.sh")
    assert launch.ignored == (
        "2 training commands have different arguments; perfmodel reads the one on line 2",
    )
    assert parse_launch(f"{command}\n{command} --node_rank 1 --save x\n", "run.sh").ignored == ()
    sweep = f"for MICRO in 1 2 4; do\n{command.replace('--micro-batch-size 1', '--micro-batch-size $MICRO')}\ndone\n"
    assert (
        "3 training commands have different arguments" in parse_launch(sweep, "run.sh").ignored[0]
    )


def test_one_task_per_node_is_a_guess() -> None:
    launch = parse_launch(
        f"#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\nsrun python {TRAIN}\n", "run.sh"
    )
    assert launch.devices == 4
    assert any(
        "one device per node is a guess from the number of tasks" in line for line in launch.assumed
    )


def test_nodes_of_a_file_are_a_guess() -> None:
    launch = launched(before="deepspeed --hostfile hosts --num_gpus 8")
    assert launch.devices == 8
    assert any(
        "devices=8 is a guess: the nodes are listed in hosts" in line for line in launch.assumed
    )
    assert launched(before="deepspeed --hostfile hosts --num_gpus 8 --num_nodes 2").devices == 16


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("--tensor-model-parallel 2", "tp", 2),
        ("--tensor_model_parallel_size=2", "tp", 2),
        ("--pipeline-model-parallel=2", "pp", 2),
        ("--expert-model-parallel-size=1", "ep", 1),
        ("--sequence-parallel --tensor-model-parallel-size 2", "sequence_parallel", True),
        ("--sequence-parallel ${EXTRA} --tensor-model-parallel-size 2", "sequence_parallel", True),
        ("--use-distributed $EXTRA", "zero", 1),
    ],
)
def test_spellings_of_arguments(argument: str, field: str, value: object) -> None:
    launch = launched(argument)
    assert launch.layout.value(field) == value
    assert launch.ignored == ()


CONFIG = '{"zero_optimization": {"stage": $STAGE, "offload_optimizer": {"device": "cpu"}}}'


def test_the_configuration_of_deepspeed_says_the_stage(tmp_path: Path) -> None:
    command = f"deepspeed --num_nodes 1 --num_gpus 8 {TRAIN} --no-pipeline-parallel --deepspeed --deepspeed_config"
    (tmp_path / "ds.json").write_text(CONFIG.replace("$STAGE", "3"))
    beside = tmp_path / "run.sh"
    beside.write_text(f"{command} ds.json\n")
    written = f"STAGE=2\ncat <<EOT > ./ds.json\n{CONFIG}\nEOT\n{command} ./ds.json\n"
    for launch, stage in ((read_launch(beside), 3), (parse_launch(written, "run.sh"), 2)):
        assert launch.layout is not None
        assert (launch.layout.zero, launch.layout.offload_states) == (stage, "optimizer")


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /x/tokenizer.model", 32000),
        ("--tokenizer-type Llama3Tokenizer", 128256),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json", 50257),
        ("--tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./ckpt/Qwen2-1.5B/", 151936),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mixtral-8x7B-v0.1",
            32000,
        ),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-2-7b-hf", 32000),
        ("--tokenizer-model nvidia/Nemotron-4-340B", 256000),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/Llama-3.2-1B/original/tokenizer.model",
            128256,
        ),
        ("--tokenizer-type Llama2Tokenizer --padded-vocab-size 32256", 32256),
        ("--vocab-size 99 --padded-vocab-size 128", 128),
    ],
)
def test_tokenizers_say_the_vocabulary(tokenizer: str, words: int) -> None:
    launch = launched(program=TRAIN.replace("--vocab-size 32000", tokenizer))
    assert model(launch).vocab == words
    assert not any("it names no tokenizer" in line for line in launch.assumed)


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 128256),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 152064),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 151936),
        ("deepseek-ai/DeepSeek-R1", 129280),
    ],
)
def test_distilled_models_have_the_tokenizer_of_the_smaller_model(
    name: str, vocabulary: int
) -> None:
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {name}"
    assert (
        model(launched(program=TRAIN.replace("--vocab-size 32000", tokenizer))).vocab == vocabulary
    )


ROUNDED_UP = ("gpt", "llama-like", "mpt", "olmoe", "pythia")
"""Models whose embeddings are rounded up from a tokenizer's vocabulary, each in its own way."""


def test_names_of_models_say_the_vocabulary_that_they_have() -> None:
    read = 0
    for name in catalog.models():
        net = catalog.model(name)
        # Transformers of images have no vocabulary, though their names may be those of a family.
        if not isinstance(net, Transformer) or not net.vocab or name.startswith(ROUNDED_UP):
            continue
        tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model hub/{name}"
        launch = launched(program=TRAIN.replace("--vocab-size 32000", tokenizer))
        if any(f"as the tokenizer hub/{name} has" in line for line in launch.assumed):
            read += 1
            assert model(launch).vocab == net.vocab, name
    assert read > 100


@pytest.mark.parametrize(
    "tokenizer", ["", "--tokenizer-model $TOKENIZER", "--tokenizer-type SentencePieceTokenizer"]
)
def test_a_vocabulary_that_nobody_says_is_named(tokenizer: str) -> None:
    launch = launched(program=TRAIN.replace("--vocab-size 32000", tokenizer))
    assert model(launch).vocab == 50257
    assert any("a vocabulary of 50,257" in line for line in launch.assumed)


@pytest.mark.parametrize(
    ("argument", "positions"),
    [
        ("rotary", "rope"),
        ("mrope", "rope"),
        ("yarn", "rope"),
        ("alibi", "alibi"),
        ("none", "none"),
        ("learned_absolute", "learned"),
        ("relative", "relative"),
    ],
)
def test_position_embeddings(argument: str, positions: str) -> None:
    assert model(launched(f"--position-embedding-type {argument}")).inputs.positions == positions


def test_positions_that_are_switched_on() -> None:
    assert (
        model(launched("--use-rotary-position-embeddings --no-position-embedding")).inputs.positions
        == "rope"
    )
    assert model(launched("--use-alibi-position-embeddings")).inputs.positions == "alibi"
    assert model(launched("--no-position-embedding")).inputs.positions == "none"


EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256"


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [
        ("--moe-layer-freq '[1]*4'", "EEEE"),
        ("--moe-layer-freq [0]+[1]*3", "-EEE"),
        ("--moe-layer-freq ([0]*1+[1]*3)", "-EEE"),
        ("--moe-layer-freq '([0]*2+[1]*2)'", "--EE"),
        ("--moe-layer-freq '([0]*1+[1]*1)*2'", "-E-E"),
        ("--moe-layer-freq '[1, 0, 0, 1]'", "E--E"),
        ("--moe-layer-freq 1", "EEEE"),
        ("--moe-layer-freq 4", "---E"),
        ("--moe-layer-freq -1", "EEEE"),
        ("--moe-layer-freq -1 --first-k-dense-replace 1", "-EEE"),
        ("--first-k-dense-replace 3", "---E"),
        ("--first-k-dense-replace 1 --moe-layer-freq 1", "-EEE"),
        ("--moe-layer-freq [0]*4", "----"),
        ("", "EEEE"),
    ],
)
def test_layers_with_experts(frequency: str, layers: str) -> None:
    stack = model(launched(f"{EXPERTS} {frequency}")).stack
    assert "".join(word[-1] for word in stack) == layers


@pytest.mark.parametrize(
    "frequency", ["'[1]*5'", "many", "'__import__(\"os\")'", "'[1]*10**9'", "0"]
)
def test_layers_with_experts_that_are_none(frequency: str) -> None:
    with pytest.raises(LaunchFileError, match=r"moe-layer-freq|num-layers"):
        launched(f"{EXPERTS} --moe-layer-freq {frequency}")


def test_megatron_deepspeed() -> None:
    deepspeed = "deepspeed --num_nodes 4 --num_gpus 8"
    launch = launched(
        "--num-experts 16 --expert-interval 1 --topk 2 --moe-expert-parallel-size 64 --deepspeed",
        deepspeed,
    )
    experts = model(launch).experts
    assert experts is not None
    assert (experts.count, experts.topk, experts.every) == (16, 2, 1)
    assert launch.layout is not None
    assert launch.layout.ep == 32  # no more than there are devices
    launch = launched(
        "--ds-sequence-parallel-size 4 --zero-stage 3 --cpu-optimizer --deepspeed", deepspeed
    )
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.cp_kind, launch.layout.zero) == (4, "ulysses", 3)
    assert launch.layout.offload_states == "optimizer"
    assert launch.layout.dp == 8
    residual = launched(
        "--num-experts 8 --mlp-type residual --ffn-hidden-size 1024 --deepspeed", deepspeed
    )
    experts = model(residual).experts
    assert experts is not None
    assert experts.shared_ffn_hidden == 1024
    launch = launched("--num-experts 64 128 --expert-interval 2 --deepspeed", deepspeed)
    assert launch.may_be_wrong == (
        "the model may be wrong: its layers have 64, 128 experts, but the prediction has 96 in each",
    )
    experts = model(
        launched("--num-experts 1 1 64 --expert-interval 2 --deepspeed", deepspeed)
    ).experts
    assert experts is not None
    assert (experts.count, experts.topk, experts.every) == (64, 1, 2)


@pytest.mark.parametrize(
    ("argument", "activation"),
    [
        ("--swiglu", "silu"),
        ("--geglu", "gelu"),
        ("--quick-geglu", "silu"),
        ("--glu-activation geglu", "gelu"),
        ("--glu-activation reglu", "relu"),
        ("--glu-activation liglu", "relu"),
        ("--use-fused-swiglu", "silu"),
    ],
)
def test_gated_feed_forwards(argument: str, activation: str) -> None:
    found = model(launched(f"{argument} --ffn-hidden-size 2048"))
    assert (found.block.gated_ffn, found.block.activation, found.ffn_hidden) == (
        True,
        activation,
        2048,
    )
    assert not launched(argument).ignored


def test_sizes_of_forks() -> None:
    launch = launched(
        f"{EXPERTS} --n-shared-experts 2 --moe-intermediate-size 128 --shared-expert-gate"
    )
    experts = model(launch).experts
    assert experts is not None
    assert (experts.ffn_hidden, experts.shared_ffn_hidden, experts.shared_gate) == (128, 256, True)
    launch = launched("--noop-layers 3 --pipeline-model-parallel-size 2")
    assert launch.layout is not None
    assert (model(launch).layers, launch.layout.partition) == (3, (2, 1))
    launch = launched("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo")
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.cp_kind) == (2, "ulysses")
    launch = launched("--num-layer-list 1,3 --pipeline-model-parallel-size 2")
    assert launch.layout is not None
    assert launch.layout.partition == (1, 3)
    found = model(
        launched("--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable")
    )
    assert (
        found.attention.window,
        found.attention.full_attention_every,
        found.attention.attention_sinks,
    ) == (
        128,
        2,
        True,
    )


@pytest.mark.parametrize(
    "argument",
    [
        "--lf-conv2d-group 1",
        "--spec some.package.specs my_layer_spec",
        "--num-hyper-layers 4",
        "--engram-dim 64",
        "--linear-attention-freq 4",
    ],
)
def test_what_changes_the_model_and_is_not_read_is_at_the_head(argument: str) -> None:
    launch = launched(argument)
    assert launch.may_be_wrong
    assert launch.may_be_wrong[0].startswith("the model may be wrong")
    assert argument.split()[0].removeprefix("--") in launch.may_be_wrong[0]


MAMBA = TRAIN.replace("pretrain_gpt.py", "pretrain_mamba.py")


@pytest.mark.parametrize(
    ("arguments", "mixers"),
    [
        ("--hybrid-override-pattern M-M*", "M-M*"),
        ("--hybrid-override-pattern 'M-|M*/*-'", "M-M*"),
        ("", "MMMM"),
        ("--hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.5", "M-*-"),
        (
            "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-layer-pattern MM*-",
            "MM*-",
        ),
    ],
)
def test_hybrids_of_mamba(arguments: str, mixers: str) -> None:
    found = model(launched(arguments, program=MAMBA))
    assert found.hybrid.mixers == mixers
    assert found.hybrid.mamba is not None
    assert (
        found.hybrid.mamba.heads,
        found.hybrid.mamba.head_dim,
        found.hybrid.mamba.state,
        found.hybrid.mamba.groups,
    ) == (16, 64, 128, 8)


def test_ratios_of_attention_and_feed_forwards_give_the_published_order_of_layers() -> None:
    """Of the 8B hybrid of arXiv 2406.07887, trained with these ratios, whose order Megatron-Core's
    documents print."""
    hybrid = launched(
        "--num-layers 56 --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5", program=MAMBA
    )
    assert model(hybrid).hybrid.mixers == "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"


def test_a_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(
        LaunchFileError,
        match=r"must name every layer, or Megatron stops; got 3, and --num-layers 4",
    ):
        launched("--hybrid-override-pattern M-M", program=MAMBA)


def test_models_that_are_no_causal_decoder() -> None:
    bert = model(
        launched("--tokenizer-type BertWordPieceLowerCase", program=TRAIN.replace("_gpt", "_bert"))
    )
    assert (bert.attention.causal, bert.inputs.token_types, bert.head.pooler_and_mlm_head) == (
        False,
        2,
        True,
    )
    t5 = model(
        launched(
            "--encoder-num-layers 6 --decoder-num-layers 3 --decoder-seq-length 128",
            program=TRAIN.replace("_gpt", "_t5"),
        )
    )
    assert (t5.layers, t5.decoder_layers, t5.decoder_seq_len) == (6, 3, 128)
    own = TRAIN.replace("_gpt", "_t5").replace("--num-layers 4", "--encoder-num-layers 4")
    t5 = model(launched("--encoder-seq-length 512", program=own.replace("--seq-length 512", "")))
    assert (t5.layers, t5.decoder_layers, t5.seq_len) == (4, 4, 512)
    launch = launched(program=TRAIN.replace("pretrain_gpt", "pretrain_vision_classify"))
    assert launch.may_be_wrong == (
        "the model may be wrong: pretrain_vision_classify.py does not train a causal decoder, but is predicted as one",
    )


NEMO = (STRANGERS / "k04b_vocabulary_not_said_nemo.yaml").read_text()


def test_nemo_trains_other_models_too() -> None:
    bert = model(parse_launch(NEMO + "  bert_binary_head: true\n", "bert.yaml"))
    assert (bert.attention.causal, bert.inputs.token_types, bert.head.pooler_and_mlm_head) == (
        False,
        2,
        True,
    )
    launch = parse_launch(NEMO + "  patch_dim: 16\n  img_h: 224\n  num_classes: 1000\n", "vit.yaml")
    assert launch.may_be_wrong[0].startswith("the model may be wrong: it encodes images (patch_dim")
    launch = parse_launch(
        NEMO.replace("type: meta-llama/Meta-Llama-3.1-8B", "type: somebody/own"), "own.yaml"
    )
    assert any("a vocabulary of 50,257" in line for line in launch.assumed)


@pytest.mark.parametrize(
    ("arguments", "framework"),
    [
        ("--use-flash-attn", "megatron-lm"),
        ("--use-flash-attn --use-mcore-models", CORE),
        ("--use-flash-attn --transformer-impl transformer_engine", CORE),
        ("--use-flash-attn --expert-model-parallel-size 2 --num-experts 8", CORE),
        ("--use-flash-attn --context-parallel-size 2", CORE),
        ("--transformer-impl local", "megatron-lm"),
        ("--transformer-impl local --use-mcore-models", CORE),
        ("--use-legacy-models --use-flash-attn", "megatron-lm"),
        ("--use-flash-attn --deepspeed --deepspeed_config ds.json", DEEPSPEED),
        ("", CORE),
    ],
)
def test_generations_of_megatron(arguments: str, framework: str) -> None:
    assert launched(arguments).framework == framework


def test_sizes_of_latent_attention_have_defaults() -> None:
    latent = model(launched("--multi-latent-attention")).latent_attention
    assert latent is not None
    assert (latent.q_lora_rank, latent.kv_lora_rank) == (0, 32)
    assert (latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim) == (128, 64, 128)
    of_fork = "--multi-head-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-nope-head-dim 32 --qk-rope-head-dim 16"
    latent = model(launched(of_fork)).latent_attention
    assert latent is not None
    assert (latent.q_lora_rank, latent.kv_lora_rank) == (96, 64)
    assert (latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim) == (32, 16, 128)
