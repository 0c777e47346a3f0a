"""Python scripts that take a recipe of NeMo 2 or Megatron-Bridge and change it."""

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.workload import parameter_count


def read(text: str, *arguments: str, name: str = "run.py", **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), name, arguments=arguments, **given)


def degrees(launch: Launch) -> tuple[int, ...]:
    assert launch.layout is not None
    return tuple(getattr(launch.layout, name) for name in ("tp", "pp", "cp", "dp", "micro_batch"))


def facts(launch: Launch) -> tuple[Any, ...]:
    return (
        launch.layout,
        launch.model,
        launch.devices,
        launch.global_batch,
        launch.seq_len,
        dict(launch.job_fields),
    )


# --- however a script is written, it is read as its statements unrolled by hand
# -----------------------------

PLAIN = """
    import nemo_run as run
    from nemo.collections import llm
    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=NODES, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = TP
    recipe.trainer.strategy.pipeline_model_parallel_size = PP
    recipe.trainer.strategy.sequence_parallel = SP
    recipe.data = run.Config(llm.MockDataModule, seq_length=SEQ, global_batch_size=GBS, micro_batch_size=MBS)
    run.run(recipe)
"""


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    tp, pp, mbs = (draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    # Enough nodes for the degrees, of which the recipe has cp=2 too.
    nodes = draw(st.sampled_from((4, 8)))
    gbs = mbs * nodes * 8 * draw(st.integers(1, 4))
    return {
        "NODES": nodes,
        "TP": tp,
        "PP": pp,
        "MBS": mbs,
        "GBS": gbs,
        "SEQ": draw(st.sampled_from((2048, 8192))),
    }


@st.composite
def written_otherwise(draw: st.DrawFn, numbers: dict[str, int]) -> tuple[str, list[str]]:
    """The same script with helper functions, loops, conditions and arguments, and its command
    line."""
    lines = ["import argparse, os", "import nemo_run as run", "from nemo.collections import llm"]
    options, given, names = [], [], {}
    for name, number in numbers.items():
        kind = draw(
            st.sampled_from(("literal", "constant", "default", "given", "sum", "environment"))
        )
        names[name] = {"literal": str(number), "constant": name, "sum": f"({number - 1} + 1)"}.get(
            kind, ""
        )
        if kind == "constant":
            lines.append(f"{name} = {number}")
        elif kind == "environment":
            names[name] = f"int(os.environ.get('MY_{name}', '{number}'))"
        elif kind in ("default", "given"):
            names[name] = f"args.{name.lower()}"
            usual = number if kind == "default" else number + 1
            options.append(f"parser.add_argument('--{name.lower()}', type=int, default={usual})")
            if kind == "given":
                given += [f"--{name.lower()}", str(number)]
    strategy = draw(st.sampled_from(("direct", "alias", "loop", "function")))
    degrees_of = {
        "tensor_model_parallel_size": names["TP"],
        "pipeline_model_parallel_size": names["PP"],
    }
    if strategy == "loop":
        pairs = ", ".join(f"'{key}': {value}" for key, value in degrees_of.items())
        change = [
            f"for key, value in {{{pairs}}}.items():",
            "    setattr(recipe.trainer.strategy, key, value)",
        ]
    elif strategy == "alias":
        change = [
            "strategy = recipe.trainer.strategy",
            *(f"strategy.{k} = {v}" for k, v in degrees_of.items()),
        ]
    elif strategy == "function":
        change = [
            "def set_degrees(r, tp, pp=1):",
            "    r.trainer.strategy.tensor_model_parallel_size = tp",
        ]
        change += ["    r.trainer.strategy.pipeline_model_parallel_size = pp"]
        change += [f"set_degrees(recipe, {names['TP']}, pp={names['PP']})"]
    else:
        change = [f"recipe.trainer.strategy.{key} = {value}" for key, value in degrees_of.items()]
    is_large = f"{names['TP']} > 1"
    if draw(st.booleans()):
        change += [f"if {is_large}:", "    recipe.trainer.strategy.sequence_parallel = True"]
        change += ["else:", "    recipe.trainer.strategy.sequence_parallel = False"]
    else:
        change.append(f"recipe.trainer.strategy.sequence_parallel = bool({is_large})")
    change += ["if False:", "    recipe.trainer.num_nodes = 77"] if draw(st.booleans()) else []
    data = f"seq_length={names['SEQ']}, global_batch_size={names['GBS']}, micro_batch_size={names['MBS']}"
    made = f"run.Config(llm.MockDataModule, {data})"
    if draw(st.booleans()):
        change += ["def make_data(**sizes):", "    return run.Config(llm.MockDataModule, **sizes)"]
        made = f"make_data({data})"
    change.append(f"recipe.data = {made}")
    body = ["parser = argparse.ArgumentParser()", *options, "args = parser.parse_args()"]
    body.append(
        f"recipe = llm.llama3_8b.pretrain_recipe(num_nodes={names['NODES']}, num_gpus_per_node=8)"
    )
    body += [*change, "run.run(recipe)"]
    if draw(st.booleans()):
        body = [
            "def main():",
            *indent("\n".join(body), "    ").split("\n"),
            "if __name__ == '__main__':",
            "    main()",
        ]
    return "\n".join([*lines, *body]) + "\n", given


@given(st.data())
def test_a_script_reads_as_its_statements_unrolled_by_hand(data: st.DataObject) -> None:
    numbers = data.draw(sizes())
    text = PLAIN
    for name, number in {**numbers, "SP": numbers["TP"] > 1}.items():
        text = text.replace(f"={name}" if name != "SP" else "= SP", f"= {number}").replace(
            f"= {name}\n", f"= {number}\n"
        )
    plain = read(text)
    other, given_arguments = data.draw(written_otherwise(numbers))
    assert facts(read(other, *given_arguments)) == facts(plain)
    assert (plain.global_batch, plain.seq_len, plain.devices) == (
        numbers["GBS"],
        numbers["SEQ"],
        numbers["NODES"] * 8,
    )
    assert degrees(plain)[:2] == (numbers["TP"], numbers["PP"])


# --- parts that a script replaces
# ----------------------------------------------------------------------

START = "import nemo_run as run\nfrom nemo.collections import llm\nr = llm.llama3_8b.pretrain_recipe(num_nodes=1)\n"


def test_data_that_are_replaced_have_their_own_batch() -> None:
    """What the new module leaves open is its own default, and nothing of the recipe's."""
    launch = read(START + "r.data = run.Config(llm.MockDataModule, seq_length=4096)\n")
    assert (launch.global_batch, launch.seq_len, degrees(launch)[-1]) == (8, 4096, 4)
    text = START + "from mine import make_data\nr.data = make_data()\n"
    with pytest.raises(LaunchFileError, match=r"global_batch_size is .*make_data.*--global-batch"):
        read(text)
    assert read(text, global_batch=16, seq_len=2048, layout="micro_batch=1").global_batch == 16


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        (
            "r.model = run.Config(llm.LlamaModel, config=run.Config(llm.Llama3Config8B, num_layers=4))",
            4,
        ),
        ("r.model = llm.LlamaModel(llm.Llama3Config8B())\nr.model.config.num_layers = 4", 4),
        (
            "class Small(llm.Llama3Config8B):\n    num_layers: int = 4\nr.model = run.Config(llm.LlamaModel, Small())",
            4,
        ),
        ("r.model.config.num_layers = 32 // 8", 4),
    ],
)
def test_models_that_are_replaced(change: str, layers: int) -> None:
    launch = read(START + change + "\n")
    assert launch.model is not None
    assert getattr(launch.model, "layers", 0) == layers
    assert parameter_count(launch.model) < 0.5 * parameter_count(catalog.model("llama3-8b"))


def test_a_model_that_is_not_known_is_asked_for() -> None:
    launch = read(START + "from mine import MyModel\nr.model = MyModel(width=3)\n")
    assert launch.model is None
    assert "--model" in " ".join(launch.missing)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ("r.trainer.plugins = bf16_with_fp8_mixed()", "fp8"),
        (
            "r.trainer.plugins = [run.Config(nl.MegatronMixedPrecision, precision='16-mixed')]",
            "fp16",
        ),
        ("r.trainer.plugins.fp8 = 'hybrid'", "fp8"),
    ],
)
def test_precisions_of_nemo(change: str, dtype: str) -> None:
    assert read(START + change + "\n").job_fields["dtype"] == dtype


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ("c.mixed_precision = 'bf16_with_mxfp8_mixed'", "fp8"),
        ("c.mixed_precision = get_precision_config('fp8_cs')", "fp8"),
        ("c.mixed_precision = MixedPrecisionConfig(fp16=True, params_dtype=torch.float16)", "fp16"),
        ("c.mixed_precision.grad_reduce_in_fp32 = False", "bf16"),
    ],
)
def test_precisions_of_megatron_bridge(change: str, dtype: str) -> None:
    launch = read(f"c = llama3_8b_pretrain_config()\n{change}\n", devices=8)
    assert launch.job_fields["dtype"] == dtype
    assert launch.may_be_wrong == ()


def test_a_model_by_its_name_on_the_hub() -> None:
    text = """
        from megatron.bridge import AutoBridge
        c = llama32_1b_pretrain_config(seq_length=1024)
        c.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-3B").to_megatron_provider(load_weights=False)
        c.model.seq_length = 2048
    """
    launch = read(text, devices=8)
    assert (launch.model, launch.seq_len) == (catalog.model("llama3.2-3b"), 2048)


def test_fine_tuning_recipes_of_nemo() -> None:
    text = "r = llm.llama3_70b.finetune_recipe(num_nodes=1, peft_scheme=SCHEME)\n"
    adapted = read(text.replace("SCHEME", "'lora'"))
    assert (degrees(adapted), adapted.global_batch, adapted.seq_len) == ((8, 1, 1, 1, 1), 128, 2048)
    assert (adapted.job_fields["frozen"], adapted.job_fields["adapter_rank"]) == (True, 16)
    whole = read("num = 4\n" + text.replace("SCHEME", "None").replace("=1", "=num"))
    assert (degrees(whole)[:2], "adapter_rank" in whole.job_fields) == ((8, 4), False)
    command = parse_launch("nemo llm finetune --factory 'llama3_70b(peft_scheme=lora)'\n", "run.sh")
    assert facts(command) == facts(adapted)


# --- which recipe runs
# ---------------------------------------------------------------------------------

FACTORIES = """
    def small(nodes=1):
        cfg = llama3_8b_pretrain_config()
        cfg.model.tensor_model_parallel_size = 2
        return cfg

    def large():
        cfg = small()
        cfg.model.tensor_model_parallel_size = 8
        return cfg

    def huge():
        cfg = small()
        cfg.train.global_batch_size = 1024
        return cfg
"""


def test_functions_that_nothing_calls_are_recipes_by_name() -> None:
    launch = read(FACTORIES, devices=16)
    assert degrees(launch)[0] == 8
    assert any("perfmodel reads large" in note and "huge" in note for note in launch.ignored)
    assert read(FACTORIES, "huge", devices=16).global_batch == 1024


def test_the_recipe_that_is_run_is_read() -> None:
    text = (
        START
        + "other = llm.gemma2_9b.pretrain_recipe()\nwith run.Experiment('x') as exp:\n    exp.add(r, name='a')\n"
    )
    assert read(text).model == catalog.model("llama3-8b")


def test_a_script_that_a_launcher_starts_gets_its_arguments(tmp_path: Path) -> None:
    script = """
        import argparse
        from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
        from shared import change
        parser = argparse.ArgumentParser()
        parser.add_argument("--tp", type=int, default=1)
        args, overrides = parser.parse_known_args()
        cfg = llama3_8b_pretrain_config()
        change(cfg, args.tp)
        process_config_with_overrides(cfg, overrides)
    """
    (tmp_path / "train.py").write_text(dedent(script))
    (tmp_path / "shared.py").write_text(
        "def change(cfg, tp):\n    cfg.model.tensor_model_parallel_size = tp\n"
    )
    (tmp_path / "run.sh").write_text(
        "TP=4\ntorchrun --nnodes 2 --nproc-per-node 8 train.py --tp $TP train.global_batch_size=64\n"
    )
    launch = read_launch(tmp_path / "run.sh")
    assert (degrees(launch)[0], launch.devices, launch.global_batch) == (4, 16, 64)
    assert launch.may_be_wrong == ()


# --- what stays open is said
# -----------------------------------------------------------------------------


def test_a_setting_that_an_undecided_condition_changes_is_a_doubt() -> None:
    text = (
        START
        + "if torch.cuda.device_count() > 4:\n    r.trainer.strategy.tensor_model_parallel_size = 4\n"
    )
    launch = read(text)
    assert degrees(launch)[0] == 1
    (doubt,) = launch.may_be_wrong
    assert doubt.startswith(
        "the layout may be wrong: trainer.strategy.tensor_model_parallel_size is 4 if torch.cuda"
    )
    assert "line 4" in doubt
    assert doubt.endswith("perfmodel assumes 1")
    assert read(text.replace("torch.cuda.device_count()", "2")).may_be_wrong == ()
    assert read(text.replace("strategy.tensor_model_parallel_size", "max_steps")).may_be_wrong == ()


def test_code_from_outside_that_may_change_the_recipe_is_a_doubt() -> None:
    text = START + "from mine import tune\nprint(r)\ntune(r, 3)\nrun.run(r)\n"
    (doubt,) = read(text).may_be_wrong
    assert "line 6 hands the recipe to tune(r, 3)" in doubt
    assert read(text.replace("tune(r, 3)", "tune(3)")).may_be_wrong == ()


def test_a_setting_that_nobody_states_is_refused_by_name() -> None:
    text = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--tp", type=int, required=True)
        args = parser.parse_args()
        cfg = llama3_8b_pretrain_config()
        cfg.model.tensor_model_parallel_size = args.tp
    """
    with pytest.raises(
        LaunchFileError, match=r"line 6: model.tensor_model_parallel_size .*--tp.*--layout tp="
    ):
        read(text, devices=8)
    assert degrees(read(text, "--tp", "4", devices=8))[0] == 4
    assert degrees(read(text, devices=8, layout="tp=2,cp=1"))[0] == 2


@pytest.mark.parametrize(
    "value", ["load('x.yaml').tp", "degree()", "config['tp']", "config.tp or 2"]
)
def test_a_setting_from_code_that_is_not_there_is_undefined(value: str) -> None:
    """And not the recipe's own, which it replaces."""
    text = START + f"config = load()\nr.trainer.strategy.tensor_model_parallel_size = {value}\n"
    with pytest.raises(LaunchFileError, match=r"line 5: model.tensor_model_parallel_size is .\$\("):
        read(text)
    assert degrees(read(text, layout="tp=2"))[0] == 2


def test_devices_that_the_scheduler_sets() -> None:
    text = (
        "import os\nr = llm.llama3_8b.pretrain_recipe(num_nodes=int(os.environ['SLURM_NNODES']))\n"
    )
    assert "--devices" in read(text).missing[0]
    assert read(text, variables={"SLURM_NNODES": "4"}).devices == 32
    assert read(text, devices=16).devices == 16


@pytest.mark.parametrize(
    ("name", "dtype", "recipe"),
    [
        ("bf16_mixed", "bf16", None),
        ("fp16_mixed", "fp16", None),
        ("bf16_with_mxfp8_mixed", "fp8", "mxfp8"),
        ("bf16_with_fp8_delayed_scaling_mixed", "fp8", "delayed"),
        ("nemotron_h_bf16_with_fp8_current_scaling_mixed", "fp8", "current"),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8", "blockwise"),
        ("bf16_with_nvfp4_mixed", "fp4", "nvfp4"),
    ],
)
def test_names_of_precisions_say_how_they_scale(name: str, dtype: str, recipe: str | None) -> None:
    for text in (f"c.mixed_precision = {name!r}", f"c.mixed_precision = {name}()"):
        fields = read(f"c = llama3_8b_pretrain_config()\n{text}\n", devices=8).job_fields
        assert (fields["dtype"], fields.get("fp8_recipe")) == (dtype, recipe)
    for text in (
        f"r.trainer.plugins = {name}()",
        f"r.trainer.plugins = run.Partial(recipes.{name})",
    ):
        fields = read(START + text + "\n").job_fields
        assert (fields["dtype"], fields.get("fp8_recipe")) == (dtype, recipe)


@pytest.mark.parametrize("model", ["llama3_8b", "mixtral_8x7b"])
def test_the_model_of_a_recipe_is_no_setting_that_was_not_read(model: str) -> None:
    script = (
        "import nemo_run as run\nfrom nemo.collections import llm\n"
        f"recipe = llm.{model}.pretrain_recipe(num_nodes=4)\nrun.run(recipe)\n"
    )
    assert parse_launch(script, "pretrain.py").ignored == ()
