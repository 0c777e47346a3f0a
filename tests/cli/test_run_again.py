"""What `search`, `compare-clusters` and `report` print can be run again: every row and every
`next:` line."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run as run_command
from thinned import one_in

import perfmodel as pm
from perfmodel import catalog
from perfmodel.ingest.launch import export_launch, read_launch, write_launch
from perfmodel.units import GIB, duration, fit_words

JOB = ["--model", "gpt3-1.3b", "--cluster", "dgx-h100", "--devices", "4", "--global-batch", "8"]
EXPERTS = [
    "--model",
    "mixtral-8x7b",
    "--cluster",
    "dgx-h100",
    "--devices",
    "16",
    "--global-batch",
    "32",
]
VARIED = ["--top", "4", "--options", "overlap,recompute", "--fix", "micro_batch=1"]
FRAMEWORKS = sorted(catalog.frameworks())
FIGURES = (
    "step_time_s",
    "step_time_lo_s",
    "step_time_hi_s",
    "memory_needed_bytes",
    "fits_probability",
    "mfu",
)

OWN_CLUSTER = """
device = "h100"
levels = [{ name = "NVLink4", size = 8, bandwidth_gb_per_s = 450, latency_us = 2 }]
"""

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line and returns what it prints."""

    def command(*words: str) -> str:
        capsys.readouterr()
        printed = run_command(capsys, *words)
        if "no layout fits" in printed.err:
            pytest.skip("the framework cannot shard the model enough for the devices")
        assert printed.status == 0, printed.err
        return printed.out

    return command


def all_with_few_at_once(*quick: str) -> list[Any]:
    """Every framework, of which only a few are not left to `make slow`."""
    assert set(quick) <= set(FRAMEWORKS)
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS
    ]


def next_words(text: str) -> list[str]:
    """The words of the `next:` line, without the program's name."""
    (line,) = (line for line in text.splitlines() if line.startswith("next: "))
    program, *words = shlex.split(line.removeprefix("next: "))
    assert program == "perfmodel"
    return words


def assert_same(again: dict[str, Any], row: dict[str, Any]) -> None:
    for name in FIGURES:
        assert again[name] == pytest.approx(row[name], rel=1e-9), (name, row["layout"])
    assert again["layout"] == row["layout"]


def check_search(run: Run, tmp_path: Path, words: list[str], rows: int) -> None:
    """Rows of a search as `predict` has them, and the layout of its `next:` line."""
    file = tmp_path / "found.json"
    command = next_words(run("search", *words, "--out", str(file)))
    found = json.loads(file.read_text())
    for row in found["layouts"][:rows]:
        of_row = [*command]
        of_row[of_row.index("--layout") + 1] = row["layout"]
        # A job file's batch is not repeated.
        if "--global-batch" in of_row:
            of_row[of_row.index("--global-batch") + 1] = str(row["global_batch"])
        assert_same(json.loads(run(*of_row, "--json")), row)
    again = json.loads(run(*command, "--json"))
    assert_same(again, found["recommended"])


@pytest.mark.parametrize(
    "framework",
    all_with_few_at_once("accelerate", "generic", "maxtext", "megatron-core"),
)
def test_rows_and_next_of_a_search_are_the_same_again(
    run: Run, tmp_path: Path, framework: str
) -> None:
    check_search(run, tmp_path, [*JOB, *VARIED, "--framework", framework], rows=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    [version.label for name in FRAMEWORKS for version in catalog.framework_versions(name)],
)
@pytest.mark.parametrize("job", [JOB, EXPERTS], ids=["dense", "experts"])
def test_every_version_of_every_framework(
    run: Run, tmp_path: Path, framework: str, job: list[str]
) -> None:
    check_search(
        run, tmp_path, [*job, "--options", "all", "--top", "24", "--framework", framework], rows=24
    )


@pytest.mark.parametrize(
    "more",
    one_in(
        2,
        [
            ["--dtype", "fp8", "--seq-len", "1024"],
            ["--optimizer", "sgd", "--grad-dtype", "bf16", "--attention", "unfused"],
            ["--recompute-modules", "core_attn,mlp", "--fix", "recompute=selective"],
            ["--lora-rank", "16"],
            ["--freeze", "embedding"],
            ["--mode", "inference"],
            ["--set", "inter_node_bandwidth=0.5x", "--set", "compute_rate=2x"],
            ["--set", "memory_bytes=0.5x"],
            ["--set", "job.cuda_graphs=step", "--set", "job.optimizer=lion"],
        ],
    ),
    ids=lambda more: " ".join(more),
)
def test_next_says_all_that_the_search_was_told(run: Run, tmp_path: Path, more: list[str]) -> None:
    check_search(run, tmp_path, [*JOB, "--top", "2", "--fix", "tp=2", *more], rows=2)


def test_next_of_a_job_file_is_the_same_again(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'model = "gpt3-1.3b"\ncluster = "dgx-h100"\ndevices = 8\nframework = "nanotron"\n'
        '[job]\nglobal_batch = 16\noptimizer = "sgd"\n[search]\nfewer_devices = true\nfix = "pp=2"\ntop = 3\n'
    )
    check_search(run, tmp_path, [str(file)], rows=3)


def test_next_of_several_batches_is_the_same_again(run: Run, tmp_path: Path) -> None:
    words = [*JOB, "--top", "4", "--fix", "tp=2"]
    words[words.index("--global-batch") + 1] = "8,16"
    check_search(run, tmp_path, words, rows=4)


@pytest.mark.parametrize("framework", all_with_few_at_once("torchtitan", "megatron-core"))
def test_rows_and_next_of_compared_clusters_are_the_same_again(
    run: Run, framework: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN_CLUSTER)
    clusters = ["--clusters", f"{own}:4,a100:4"]
    words = [
        "--model",
        "gpt3-1.3b",
        "--global-batch",
        "8",
        "--framework",
        framework,
        "--optimizer",
        "sgd",
    ]
    found = json.loads(run("compare-clusters", *words, *clusters, "--json"))
    for row in found["clusters"]:
        cluster = str(own) if row["cluster"] == "own" else row["cluster"]
        again = run("predict", *words, "--cluster", cluster, "--layout", row["layout"], "--json")
        for name in ("step_time_s", "memory_needed_bytes", "fits_probability"):
            assert json.loads(again)[name] == pytest.approx(row[name], rel=1e-9)
    again = json.loads(run(*next_words(run("compare-clusters", *words, *clusters)), "--json"))
    first = found["clusters"][0]
    assert (again["cluster"], again["layout"]) == (first["cluster"], first["layout"])
    assert again["step_time_s"] == pytest.approx(first["step_time_s"], rel=1e-9)


@pytest.mark.parametrize("framework", all_with_few_at_once("deepspeed"))
def test_rows_of_a_report_are_the_same_again(run: Run, framework: str, tmp_path: Path) -> None:
    words = [
        *JOB,
        "--framework",
        framework,
        "--top",
        "4",
        "--fix",
        "micro_batch=1",
        "--optimizer",
        "sgd",
    ]
    data = json.loads(run("report", *words, "--json"))
    for row in data["rows"]:
        layout = ["--global-batch", str(row["global_batch"]), "--layout", row["layout"]]
        again = json.loads(run("predict", *shlex.split(data["flags"]), *layout, "--json"))
        # the page rounds its figures
        assert again["step_time_s"] == pytest.approx(row["step_s"], rel=1e-5)
        assert again["memory_needed_bytes"] == pytest.approx(row["memory_bytes"], rel=1e-5)
        assert again["fits_probability"] == pytest.approx(row["fits"], rel=1e-5)


def test_one_layout_has_the_same_figures_in_every_output(run: Run, tmp_path: Path) -> None:
    """In the table, the recommendation, `predict`, its page and its JSON: `needed` is needed
    everywhere."""
    words = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "32",
    ]
    words += ["--framework", "torchtitan", "--top", "3"]
    file = tmp_path / "found.json"
    text = run("search", *words, "--out", str(file))
    found = json.loads(file.read_text())
    lines = text.splitlines()
    for row in found["layouts"]:
        # a long layout stands on the line below its figures, a short one beside them
        place = next(i for i, line in enumerate(lines) if line.endswith(row["layout"]))
        figures = lines[place - 1] if lines[place].strip() == row["layout"] else lines[place]
        cells = figures.split()
        needed = row["memory_needed_bytes"] / GIB
        assert f"{needed:.1f}" in cells
        assert f"{row['fits_probability']:.2f}" in cells
        assert needed <= row["memory_capacity_bytes"] / GIB
    best = found["recommended"]
    words_of_best = (
        f"needs {best['memory_needed_bytes'] / GIB:.1f} of {best['memory_capacity_bytes'] / GIB:.1f} GiB: "
        f"{fit_words(best['fits_probability'])}"
    )
    assert f"  {duration(best['step_time_s'])} per step, " in text
    assert f"  {words_of_best}\n" in text
    predicted = run(*next_words(text))
    assert f"memory: {words_of_best}" in predicted
    assert f"step time {duration(best['step_time_s'])} " in predicted
    again = pm.predict(
        "llama3-8b", "dgx-h100", best["layout"], global_batch=32, framework="torchtitan"
    )
    assert words_of_best in again._repr_html_()


def test_the_share_beyond_measurements_is_said_in_one_way(run: Run) -> None:
    """What the warning calls analytical and extrapolated is what the table of origins calls so."""
    words = [
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "mi325x",
        "--global-batch",
        "8",
        "--layout",
        "dp=8",
    ]
    shares = json.loads(run("predict", *words, "--json"))["provenance"]
    text = " ".join(run("predict", *words).split())
    assert shares["analytical"] + shares["extrapolated"] > 0.01
    named = [
        f"{name} {shares[name]:.1%}" for name in ("analytical", "extrapolated") if shares[name] > 0
    ]
    beyond = shares["analytical"] + shares["extrapolated"]
    assert (
        f"{beyond:.1%} of the critical path rests on no measurement of MI325X ({', '.join(named)})"
        in text
    )
    for share in named:
        assert text.count(share.split()[0] + " ") >= 1


@pytest.mark.parametrize(
    ("framework", "ending"),
    [
        ("nanotron", "nanotron.yaml"),
        ("megatron-core", "sh"),
        ("torchtitan", "toml"),
        ("deepspeed", "json"),
    ],
)
def test_an_exported_file_is_the_same_in_python_and_in_the_shell(
    run: Run, tmp_path: Path, framework: str, ending: str
) -> None:
    file = tmp_path / f"best.{ending}"
    pipeline = ["--fix", "pp=2"] if framework != "deepspeed" else []
    text = run("search", *JOB, "--framework", framework, *pipeline, "--export", str(file))
    recommended = json.loads(run(*next_words(text), "--json"))
    shell = json.loads(run("predict", "--from", str(file), *JOB[:4], "--json"))
    launch = read_launch(file, model="gpt3-1.3b")
    python = pm.predict(launch.problem("dgx-h100"), layout=launch.layout)
    assert python.step_time_s == pytest.approx(shell["step_time_s"], rel=1e-12)
    assert python.memory_needed_bytes == shell["memory_needed_bytes"]
    assert str(python.layout) == str(
        pm.framework(framework).layout(shell["layout"], catalog.model("gpt3-1.3b"))[0]
    )
    assert recommended["step_time_s"] == pytest.approx(shell["step_time_s"], rel=1e-6)


def test_next_of_a_launch_file_is_the_same_again(run: Run, tmp_path: Path) -> None:
    """What the file says otherwise, and the layout has as its framework usually has it, is said
    too."""
    file = tmp_path / "train.sh"
    layout = pm.Layout(tp=2, dp=2, zero=1, recompute="full", sequence_parallel=True)
    job = pm.Job(global_batch=8, seq_len=2048)
    write_launch(file, export_launch(layout, "megatron-core", model="gpt3-1.3b", job=job))
    check_search(
        run, tmp_path, ["--from", str(file), "--cluster", "dgx-h100", "--top", "4"], rows=0
    )


def test_next_repeats_nothing_that_a_file_says(run: Run, tmp_path: Path) -> None:
    """Devices and batch stand in the file, and are not stated again."""
    script = tmp_path / "train.sh"
    layout = pm.Layout(tp=2, dp=2, zero=1)
    job = pm.Job(global_batch=8, seq_len=2048)
    write_launch(script, export_launch(layout, "megatron-core", model="gpt3-1.3b", job=job))
    file = tmp_path / "job.toml"
    file.write_text(
        'model = "gpt3-1.3b"\ncluster = "dgx-h100"\ndevices = 4\n'
        "[job]\nglobal_batch = 8\n[layout]\ntp = 2\ndp = 2\n"
    )
    machine = ["--cluster", "dgx-h100"]
    for words in (["--from", str(script), *machine], [str(file)]):
        for command in ("predict", "search"):
            further = next_words(run(command, *words, *(["--top", "1"] * (command == "search"))))
            assert not {"--devices", "--global-batch"} & {*further}, further
        # What the command line states instead of the file is stated again.
        further = next_words(run("predict", *words, "--global-batch", "16"))
        assert further[further.index("--global-batch") + 1] == "16"
        further = next_words(run("search", *words, "--top", "1", "--devices", "8"))
        assert further[further.index("--devices") + 1] == "8"


def test_next_states_a_batch_that_follows_from_the_layout(run: Run, tmp_path: Path) -> None:
    """A script that states the batch of one replica has another batch with more replicas."""
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings | {"bf16": {"enabled": True}}))
    words = ["--from", str(file), "--model", "gpt3-1.3b", "--cluster", "dgx-h100"]
    text = run("search", *words, "--devices", "4", "--top", "1")
    again = json.loads(run(*next_words(text), "--json"))
    assert again["global_batch"] == 8
