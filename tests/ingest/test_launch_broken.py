"""Broken launch files are refused in one line that names the file, the line and the remedy; nothing
else comes out."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch import format_of_path, parse_launch, read_launch

FILES = Path(__file__).parent / "launch_files"
NAMES = sorted(path.name for path in FILES.iterdir())


class Damage(NamedTuple):
    """A change that breaks a launch file, and the error that it leads to."""

    file: str
    text: str
    """The text of the file that is changed."""
    damaged: str
    """What the text becomes."""
    message: str
    """Words of the error, as a regular expression."""
    lines_later: int = 0
    """Lines behind the change that the error names."""


BROKEN = {
    "quote": Damage(
        file="megatron_gpt3.sh",
        text="NODE_RANK=0",
        damaged="NODE_RANK='0",
        message="a quote is opened here and never closed",
    ),
    "array": Damage(
        file="megatron_gpt3.sh",
        text="    ${PARALLEL[@]} ",
        damaged="    A=( ",
        message="the array A is never closed; add its `.`",
    ),
    "number": Damage(
        file="megatron_gpt3.sh",
        text="--num-layers 96",
        damaged="--num-layers many",
        message="num-layers must be a whole number of at least 1, got 'many'",
    ),
    "variable": Damage(
        file="megatron_gpt3.sh",
        text="tensor-model-parallel-size 8",
        damaged="tensor-model-parallel-size $TP",
        message=r"tensor-model-parallel-size is '\$\{TP\}', which the file does not define; .* --layout tp=",
    ),
    "recompute": Damage(
        file="megatron_arguments.txt",
        text="full",
        damaged="some",
        message="must be full or selective, got 'some'",
    ),
    "toml": Damage(
        file="torchtitan_8b.toml",
        text="seq_len = 8192",
        damaged="seq_len = ",
        message="not valid TOML.*fix that line",
    ),
    "toml value": Damage(
        file="torchtitan_8b.toml",
        text="seq_len = 8192",
        damaged='seq_len = "long"',
        message="training.seq_len must be a whole number",
    ),
    "schedule": Damage(
        file="torchtitan_405b.toml",
        text="Interleaved1F1B",
        damaged="Interleaved9F9B",
        message="must be one of 1F1B, GPipe",
    ),
    "mode": Damage(
        file="torchtitan_8b.toml",
        text='mode = "selective"',
        damaged='mode = "most"',
        message="must be one of none, selective, full",
    ),
    "json": Damage(
        file="deepspeed_zero3.json",
        text='"train_batch_size": 256,',
        damaged='"train_batch_size": 256',
        lines_later=1,
        message="not valid JSON.*fix",
    ),
    "stage": Damage(
        file="deepspeed_zero3.json",
        text='"stage": 3',
        damaged='"stage": -1',
        message="zero_optimization.stage must be",
    ),
    "yaml": Damage(
        file="nanotron_3d.yaml",
        text="  zero_stage: 1",
        damaged="  zero_stage: [1",
        lines_later=1,
        message="not valid YAML.*fix this line",
    ),
    "template": Damage(
        file="nanotron_3d.yaml",
        text="  tp: 4",
        damaged="  tp: {{ tp }}",
        message="a template, not YAML; replace the parts in",
    ),
    "statement": Damage(
        file="nanotron_3d.yaml",
        text="  tp: 4",
        damaged="{% if tp %}",
        lines_later=0,
        message="a template, not YAML",
    ),
    "no key": Damage(
        file="nanotron_3d.yaml",
        text="  tp: 4",
        damaged="  [a, b]: 4",
        lines_later=0,
        message="a key must be plain text",
    ),
    "yaml value": Damage(
        file="nanotron_3d.yaml",
        text="  pp: 2",
        damaged="  pp: two",
        message="parallelism.pp must be a whole number",
    ),
    "itself": Damage(
        file="llm_foundry_7b.yaml",
        text="  max_seq_len: 2048",
        damaged="  max_seq_len: ${max_seq_len}",
        message="refers to itself",
    ),
    "nowhere": Damage(
        file="llm_foundry_7b.yaml",
        text="max_seq_len: ${variables.max_seq_len}",
        damaged="max_seq_len: ${variables.len}",
        message="which the file does not define",
    ),
    "strategy": Damage(
        file="llm_foundry_7b.yaml",
        text="FULL_SHARD",
        damaged="ALL_OF_IT",
        message="must be one of FULL_SHARD, SHARD_GRAD_OP",
    ),
    "axis": Damage(
        file="maxtext_tpu.yml",
        text="ici_tensor_parallelism: 4",
        damaged="ici_tensor_parallelism: 0",
        message="must be -1",
    ),
    "precision": Damage(
        file="nemo_llama.yaml",
        text="precision: bf16",
        damaged="precision: bf61",
        message="trainer.precision must be one of",
    ),
    "activation": Damage(
        file="nemo_llama.yaml",
        text="fast-swiglu",
        damaged="slow-swiglu",
        message="model.activation must be one of",
    ),
    "granularity": Damage(
        file="bridge_fsdp.yaml",
        text="recompute_granularity: full",
        damaged="recompute_granularity: most",
        message="must be full or selective",
    ),
    "accelerate": Damage(
        file="accelerate_fsdp.yaml",
        text="mixed_precision: bf16",
        damaged="mixed_precision: bf17",
        message="must be one of bf16",
    ),
}


@pytest.mark.parametrize(
    ("name", "was", "becomes", "key"),
    [
        (
            "deepspeed_zero3.json",
            '"train_batch_size": 256,',
            '"train_batch_size": 1, "train_batch_size": 256,',
            "train_batch_size",
        ),
        ("nanotron_3d.yaml", "  dp: 4\n", "  dp: 2\n  dp: 4\n", "parallelism.dp"),
    ],
)
def test_of_a_key_that_is_given_twice_the_last_counts(
    name: str, was: str, becomes: str, key: str, tmp_path: Path
) -> None:
    text = (FILES / name).read_text()
    path = tmp_path / name
    path.write_text(text)
    once = read_launch(path, devices=32)
    assert was in text
    path.write_text(text.replace(was, becomes, 1))
    twice = read_launch(path, devices=32)
    assert (twice.layout, twice.global_batch) == (once.layout, once.global_batch)
    assert any(f"{key} appears twice; the last value counts" in note for note in twice.ignored)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_one_line_that_names_the_line(
    case: str, tmp_path: Path
) -> None:
    damage = BROKEN[case]
    text = (FILES / damage.file).read_text()
    line = text.count("\n", 0, text.index(damage.text)) + 1 + damage.lines_later
    path = tmp_path / damage.file
    path.write_text(text.replace(damage.text, damage.damaged, 1))
    with pytest.raises(LaunchFileError, match=damage.message) as error:
        read_launch(path, devices=16)
    message = str(error.value)
    assert message.startswith(str(path))
    assert f"line {line}" in message
    assert "\n" not in message


def test_files_that_are_none() -> None:
    with pytest.raises(LaunchFileError, match=r"nothing.yaml: cannot be read \(No such file"):
        read_launch("nothing.yaml")
    with pytest.raises(
        LaunchFileError,
        match=r"notes.yaml: not a launch file that perfmodel can read \(files of nemo set .*--model",
    ):
        parse_launch("a: 1\n", "notes.yaml")
    with pytest.raises(LaunchFileError, match="must hold keys and values"):
        parse_launch("- 1\n- 2\n", "list.yaml")
    with pytest.raises(LaunchFileError, match="must hold one JSON object"):
        parse_launch("[1, 2]", "list.json")
    with pytest.raises(LaunchFileError, match="not a launch file that perfmodel can read"):
        parse_launch("echo hello\n", "hello.sh")


@pytest.mark.parametrize(
    "head", [(), ("apiVersion: v1", "kind: Job")], ids=["settings", "manifest"]
)
def test_aliases_that_multiply_are_refused(head: tuple[str, ...]) -> None:
    lines = [*head, "a0: &a0 {x: 1, y: 2}"]
    lines += [
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 9)
    ]
    with pytest.raises(PerfModelError, match="once its aliases are written out"):
        parse_launch("\n".join(lines) + "\n", "laughs.yaml")


def test_numbers_that_contradict_one_another() -> None:
    launch = read_launch(FILES / "nemo_llama.yaml", devices=12)
    assert launch.layout is None  # a search needs none
    assert launch.missing == (
        "12 devices are not a multiple of its tp*cp*pp = 4*2*2; give --devices or --layout",
    )
    text = (
        (FILES / "deepspeed_zero3.json")
        .read_text()
        .replace('"train_micro_batch_size_per_gpu": 4,', "")
    )
    with pytest.raises(LaunchFileError, match=r"is .* which is not a whole number"):
        parse_launch(text, "ds.json", devices=48)
    text = (FILES / "megatron_strings.sh").read_text().replace("VPP_LAYERS=4", "VPP_LAYERS=5")
    with pytest.raises(
        LaunchFileError, match="32 layers cannot be divided into chunks of 5 on 2 pipeline stages"
    ):
        parse_launch(text, "train.sh")


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_files_say_something_or_are_refused(data: st.DataObject) -> None:
    """Characters cut out of, or put into, real-shaped files: no other exception leaves the
    readers."""
    name = data.draw(st.sampled_from(NAMES))
    text = (FILES / name).read_text()
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        put = data.draw(
            st.one_of(st.text(max_size=4), st.sampled_from("${}()[]\"'\\`=:-#&*!|<>\n\t"))
        )
        text = text[:start] + put + text[start + length :]
    said = ""
    try:
        parse_launch(text, name, devices=data.draw(st.sampled_from((None, 16))))
    except PerfModelError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize("name", ["best.xyz", "best.txt", "best.py"])
def test_no_launch_file_is_written_under_an_ending_that_none_has(name: str) -> None:
    with pytest.raises(
        LaunchFileError, match=r"no launch file can be written with this ending; use \.sh"
    ):
        format_of_path(Path(name))


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("\n")
    with pytest.raises(LaunchFileError, match=r"train.sh: the file is empty; give a launch file"):
        read_launch(tmp_path / "train.sh")


@pytest.mark.parametrize(
    "command",
    [
        "./runner/primus-cli train pretrain --config",
        "accelerate launch --config_file",
        "torchrun --nproc_per_node",
        "torchrun --nproc_per_node=8 pretrain_gpt.py --tensor-model-parallel-size",
        "deepspeed --num_gpus",
        "deepspeed train.py --deepspeed",
        "swift sft --model",
        "llamafactory-cli train",
        "xtuner train",
        "mpirun -np",
        "srun -N",
        "nemo llm pretrain --factory",
        "tune run --config",
        "axolotl train",
    ],
)
def test_a_command_that_ends_before_a_value_is_no_fault_of_the_reader(command: str) -> None:
    """As at the end of a file that was cut off."""
    # The value stays open: what is read is said to miss something, or the file is refused.
    with suppress(PerfModelError):
        launch = parse_launch(command, "run.sh")
        assert launch.missing or launch.ignored or launch.model is None
