"""Broken launch files are refused in one line that names the file, the line and the remedy; nothing
else comes out."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch import format_of_path, parse_launch, read_launch

FILES = Path(__file__).parent / "launch_files"
NAMES = sorted(path.name for path in FILES.iterdir())

BROKEN = {
    # file, the text that is changed, what becomes of it, how many lines later it shows, words of
    # the message
    "quote": ("megatron_gpt3.sh", "NODE_RANK=0", "NODE_RANK='0", 0, "a quote is opened here and never closed"),
    "array": ("megatron_gpt3.sh", "    ${PARALLEL[@]} ", "    A=( ", 0, "the array A is never closed; add its `.`"),
    "number": ("megatron_gpt3.sh", "--num-layers 96", "--num-layers many", 0,
               "num-layers must be a whole number of at least 1, got 'many'"),
    "variable": ("megatron_gpt3.sh", "tensor-model-parallel-size 8", "tensor-model-parallel-size $TP", 0,
                 r"tensor-model-parallel-size is '\$\{TP\}', which the file does not define; .* --layout tp="),
    "recompute": ("megatron_arguments.txt", "full", "some", 0, "must be full or selective, got 'some'"),
    "toml": ("torchtitan_8b.toml", "seq_len = 8192", "seq_len = ", 0, "not valid TOML.*fix that line"),
    "toml value": ("torchtitan_8b.toml", "seq_len = 8192", 'seq_len = "long"', 0,
                   "training.seq_len must be a whole number"),
    "schedule": ("torchtitan_405b.toml", "Interleaved1F1B", "Interleaved9F9B", 0, "must be one of 1F1B, GPipe"),
    "mode": ("torchtitan_8b.toml", 'mode = "selective"', 'mode = "most"', 0, "must be one of none, selective, full"),
    "json": ("deepspeed_zero3.json", '"train_batch_size": 256,', '"train_batch_size": 256', 1, "not valid JSON.*fix"),
    "stage": ("deepspeed_zero3.json", '"stage": 3', '"stage": -1', 0, "zero_optimization.stage must be"),
    "yaml": ("nanotron_3d.yaml", "  zero_stage: 1", "  zero_stage: [1", 1, "not valid YAML.*fix this line"),
    "template": ("nanotron_3d.yaml", "  tp: 4", "  tp: {{ tp }}", 0, "a template, not YAML; replace the parts in"),
    "statement": ("nanotron_3d.yaml", "  tp: 4", "{% if tp %}", 0, "a template, not YAML"),
    "no key": ("nanotron_3d.yaml", "  tp: 4", "  [a, b]: 4", 0, "a key must be plain text"),
    "yaml value": ("nanotron_3d.yaml", "  pp: 2", "  pp: two", 0, "parallelism.pp must be a whole number"),
    "itself": ("llm_foundry_7b.yaml", "  max_seq_len: 2048", "  max_seq_len: ${max_seq_len}", 0, "refers to itself"),
    "nowhere": ("llm_foundry_7b.yaml", "max_seq_len: ${variables.max_seq_len}", "max_seq_len: ${variables.len}", 0,
                "which the file does not define"),
    "strategy": ("llm_foundry_7b.yaml", "FULL_SHARD", "ALL_OF_IT", 0, "must be one of FULL_SHARD, SHARD_GRAD_OP"),
    "axis": ("maxtext_tpu.yml", "ici_tensor_parallelism: 4", "ici_tensor_parallelism: 0", 0, "must be -1"),
    "precision": ("nemo_llama.yaml", "precision: bf16", "precision: bf61", 0, "trainer.precision must be one of"),
    "activation": ("nemo_llama.yaml", "fast-swiglu", "slow-swiglu", 0, "model.activation must be one of"),
    "granularity": ("bridge_fsdp.yaml", "recompute_granularity: full", "recompute_granularity: most", 0,
                    "must be full or selective"),
    "accelerate": ("accelerate_fsdp.yaml", "mixed_precision: bf16", "mixed_precision: bf17", 0, "must be one of bf16"),
}  # fmt: skip


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
    name, was, becomes, later, message = BROKEN[case]
    text = (FILES / name).read_text()
    line = text.count("\n", 0, text.index(was)) + 1 + later
    path = tmp_path / name
    path.write_text(text.replace(was, becomes, 1))
    with pytest.raises(LaunchFileError, match=message) as error:
        read_launch(path, devices=16)
    said = str(error.value)
    assert said.startswith(str(path))
    assert f"line {line}" in said
    assert "\n" not in said


def test_files_that_are_none() -> None:
    with pytest.raises(LaunchFileError, match=r"nothing.yaml: cannot be read \(No such file"):
        read_launch("nothing.yaml")
    with pytest.raises(
        LaunchFileError,
        match=r"notes.yaml: not a launch file that perfmodel can read .one of nemo has .*--model",
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
