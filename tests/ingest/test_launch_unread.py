"""Settings that nobody reads: what may be wrong stands at the head, the worst first, and noise is
left out."""

import json
from pathlib import Path

import pytest

from perfmodel.cli import main
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import parse_launch

SIZES = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 32000 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16"
)

SUBJECT_OF = {
    "--unknown-num-layers 3": "the model",
    "--new-experts-per-group 4": "the model",
    "--extra-hidden-dim 64": "the model",
    "--another-head-dim 64": "the model",
    "--dora-rank 8": "the training method",
    "--freeze-first-layers 2": "the training method",
    "--sequence-parallel-kind ring": "the layout",
    "--my-pipeline-stages 2": "the layout",
    "--zero-level 3": "the layout",
    "--attention-fp4": "the precision",
    "--new-recompute-of-norms": "memory",
    "--offload-something": "memory",
}
"""Unread arguments, and what each may make wrong."""


@pytest.mark.parametrize("argument", SUBJECT_OF)
def test_an_unread_argument_names_what_may_be_wrong(argument: str) -> None:
    launch = parse_launch(f"{SIZES} {argument}\n", "run.sh", devices=8)
    name = argument.split()[0].removeprefix("--")
    assert launch.may_be_wrong == (
        f"{SUBJECT_OF[argument]} may be wrong: 1 unread flag: {name} (line 1)",
    )
    assert launch.ignored == (f"{name} (line 1)",)


@pytest.mark.parametrize("name", ["dion", "SOAP", "my_optimizer"])
def test_an_optimizer_that_nobody_knows_is_named(name: str) -> None:
    launch = parse_launch(f"{SIZES} --optimizer {name}\n", "run.sh", devices=8)
    assert launch.may_be_wrong == (f"memory may be wrong: optimizer {name} is predicted as Adam",)
    assert "optimizer" not in launch.job_fields


CONVERSIONS = (
    "tools/checkpoint/qwen_moe_mcore.py",
    "toolkits/hf2mcore_qwen.py",
    "tools/convert_checkpoint.py",
    "tools/run_text_generation_server.py",
    "evaluate_gpt.py",
)


@pytest.mark.parametrize("program", CONVERSIONS)
def test_a_program_that_does_not_train_is_refused_unless_another_trains(program: str) -> None:
    flags = SIZES.partition(" ")[2]
    conversion = f"torchrun --nproc_per_node 1 {program} {flags} --tensor-model-parallel-size 2\n"
    with pytest.raises(LaunchFileError, match="must be a program that trains") as refusal:
        parse_launch(conversion, "run.sh")
    assert "\n" not in str(refusal.value)
    launch = parse_launch(f"{conversion}torchrun --nproc_per_node 8 {SIZES}\n", "run.sh")
    assert launch.devices == 8
    assert launch.layout is not None
    assert launch.layout.tp == 1


@pytest.mark.parametrize(
    "program", ["pretrain_gpt.py", "finetune_eval_gpt.py", "run_evaluate_and_train.py", "main.py"]
)
def test_a_program_that_trains_is_read(program: str) -> None:
    text = SIZES.replace("pretrain_gpt.py", f"torchrun --nproc_per_node 8 {program}")
    assert parse_launch(text, "run.sh").devices == 8


NOISE = (
    "--no-mmap-bin-files --log-interval 10 --my-log-a --log-throughput --tensorboard-dir tb --wandb-project p "
    "--wandb-exp-name e --save ck --load ck --save-interval 500 --no-load-optim --ckpt-format torch_dist --seed 1 "
    "--data-path d --data-cache-path c --split 99,1,0 --num-workers 2 --eval-iters 1 --lr 1e-4 --lr-warmup-iters 10 "
    "--weight-decay 0.1 --clip-grad 1.0 --distributed-timeout-minutes 60 --swanlab-project p --reset-position-ids"
)


def test_noise_is_left_out() -> None:
    launch = parse_launch(f"{SIZES} {NOISE} --noop-blocks-of-the-model 3\n", "run.sh", devices=8)
    assert launch.ignored == ("noop-blocks-of-the-model (line 1)",)
    assert len(launch.may_be_wrong) == 1


def test_the_worst_comes_first_whatever_the_order_of_the_file() -> None:
    arguments = [
        "--some-overlap",
        "--new-offload",
        "--fp4-head",
        "--zero-level 2",
        "--dora-rank 4",
        "--extra-layers 2",
    ]
    launches = [
        parse_launch(f"{SIZES} {' '.join(some_order)}\n", "run.sh", devices=8)
        for some_order in (arguments, arguments[::-1])
    ]
    assert launches[0].ignored == launches[1].ignored
    names = [name.split()[0] for name in launches[0].ignored]
    assert names == [
        "extra-layers",
        "dora-rank",
        "zero-level",
        "fp4-head",
        "new-offload",
        "some-overlap",
    ]
    subjects = [line.partition(" may")[0] for line in launches[0].may_be_wrong]
    assert subjects == ["the model", "the training method", "the layout", "the precision", "memory"]


def test_a_model_that_is_given_cannot_be_wrong() -> None:
    text = f"{SIZES} --extra-layers 2\n"
    assert parse_launch(text, "run.sh", devices=8).may_be_wrong
    assert not parse_launch(text, "run.sh", devices=8, model="gpt2-345m").may_be_wrong


def test_what_may_be_wrong_is_at_the_head_of_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{SIZES} --extra-layers 2\n")
    command = ["predict", "--from", str(path), "--devices", "8", "--cluster", "dgx-a100"]
    expected = "the model may be wrong: 1 unread flag: extra-layers (line 1)"
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == expected
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["may_be_wrong"] == [expected]


UNDEFINED = {
    # the argument whose value the file does not define, what replaces it
    "--tensor-model-parallel-size $TP": {"layout": "tp=2"},
    "--pipeline-model-parallel-size ${PP}": {"layout": "pp=1"},
    "--micro-batch-size $1": {"layout": "micro_batch=2"},
    "--global-batch-size $2": {"global_batch": 16},
    "--seq-length $(cat length)": {"seq_len": 1024},
    "--num-layers $3": {"model": "gpt2-345m"},
    "--num-experts $E": {"model": "gpt2-345m"},
    "--nproc-per-node ${4}": {"devices": 8},
    "--nnodes $NODES": {"devices": 8},
}


@pytest.mark.parametrize("argument", UNDEFINED)
def test_what_is_given_replaces_what_the_file_cannot_say(argument: str) -> None:
    text = f"torchrun --nproc-per-node 4 {SIZES} {argument}\n"
    with pytest.raises(LaunchFileError, match=r"which the file does not define; .* give --"):
        parse_launch(text, "run.sh")
    launch = parse_launch(text, "run.sh", **UNDEFINED[argument])
    assert launch.layout is not None
    for name, value in UNDEFINED[argument].items():
        if name == "layout":
            assert value in str(launch.layout)
        elif name == "model":
            assert launch.model is not None
            assert launch.model.name == value
        else:
            assert getattr(launch, name) == value


def test_a_search_needs_no_layout_of_the_file() -> None:
    text = f"torchrun --nproc-per-node 8 {SIZES} --tensor-model-parallel-size $TP\n"
    with pytest.raises(LaunchFileError, match=r"--layout tp="):
        parse_launch(text, "run.sh")
    launch = parse_launch(text, "run.sh", needs_layout=False)
    assert (launch.devices, launch.global_batch) == (8, 8)


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": 64, "zero_optimization": {"stage": 1}}',
        '{"train_micro_batch_size_per_gpu": 2}',
    ],
)
def test_a_length_that_is_given_is_not_assumed(text: str) -> None:
    launch = parse_launch(text, "ds.json", model="llama3-8b", devices=8, seq_len=2048)
    assert launch.seq_len == 2048
    assert not any("seq_len=" in line for line in launch.assumed)
    launch = parse_launch(text, "ds.json", model="llama3-8b", devices=8)
    assert any("seq_len=8,192" in line for line in launch.assumed)


MISSPELT = {
    "run.sh": (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 "
        "--tensor-model-paralel-size 2\n",
        "tensor-model-parallel-size",
    ),
    "axolotl.yaml": (
        "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 1\nsequence_len: 2048\n"
        "gradient_acumulation_steps: 4\n",
        "gradient_accumulation_steps",
    ),
    "ds.json": (
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, '
        '"gradient_acumulation_steps": 4}',
        "gradient_accumulation_steps",
    ),
    "titan.toml": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_paralel_degree = 2\n',
        "parallelism.tensor_parallel_degree",
    ),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_setting_is_named_with_the_one_that_is_meant(name: str) -> None:
    text, meant = MISSPELT[name]
    launch = parse_launch(text, name, devices=8)
    assert any(f"did you mean {meant}?" in line for line in launch.ignored)
    right = text.replace("paralel", "parallel").replace("acumulation", "accumulation")
    assert not any("did you mean" in line for line in parse_launch(right, name, devices=8).ignored)
