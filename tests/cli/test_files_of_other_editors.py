"""Files as other editors and systems leave them: marks of the byte order, line ends, encodings,
comments, columns named twice, folders. They are read as meant, or refused with what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run

from perfmodel.cli import samples

TEXT = samples()
CLUSTER = ("--cluster", "dgx-h100")
READERS: dict[str, tuple[str, ...]] = {
    "job.toml": ("predict", "job.toml"),
    "train.sh": ("predict", "--from", "train.sh", *CLUSTER),
    "train.log": ("check", "--from", "script.sh", "--log", "train.log", *CLUSTER),
    "kernels.csv": ("validate", "kernels", "kernels.csv"),
    "runs.csv": ("validate", "cases", "runs.csv"),
    "cluster.toml": ("predict", "of_a_job.toml", "--cluster", "cluster.toml"),
    "nccl.txt": ("import", "nccl-tests", "nccl.txt", *CLUSTER, "--out", "out.csv"),
}
"""Commands by the file that they read."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in TEXT.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "script.sh").write_text(TEXT["train.sh"])
    (tmp_path / "of_a_job.toml").write_text(TEXT["job.toml"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "write",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    ],
    ids=["mark", "line ends", "both"],
)
@pytest.mark.parametrize("name", READERS)
def test_marks_and_line_ends_change_nothing(
    name: str, write: Callable[[str], bytes], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_meant = run(capsys, *READERS[name])
    assert as_meant.status == 0, as_meant.err
    (folder / name).write_bytes(write(TEXT[name]))
    assert run(capsys, *READERS[name])[:2] == as_meant[:2]


@pytest.mark.parametrize("name", READERS)
def test_another_encoding_is_refused_by_name(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(TEXT[name].encode("utf-16"))
    printed = run(capsys, *READERS[name])
    assert printed.status == 2
    assert name in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("name", READERS)
def test_a_folder_in_place_of_a_file_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    printed = run(capsys, *READERS[name])
    assert printed.status == 2
    last = " ".join(printed.err.splitlines()[-3:])
    assert name in last
    assert "folder" in last or "irectory" in last


def test_a_column_that_is_named_twice_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = TEXT["kernels.csv"].splitlines()
    doubled = [f"{lines[0]},time_us", *(f"{line},1.0" for line in lines[1:])]
    (folder / "kernels.csv").write_text("\n".join(doubled) + "\n")
    printed = run(capsys, *READERS["kernels.csv"])
    assert printed.status == 2
    assert "two columns are named 'time_us'" in " ".join(printed.err.split())


@pytest.mark.parametrize("comment", ["// a comment", "/* a comment */", "# a comment"])
def test_a_comment_in_json_is_named(
    comment: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(f'{{ {comment}\n"model_type": "llama"}}')
    printed = run(
        capsys,
        *("predict", "--model", "config.json", *CLUSTER, "--global-batch", "8", "--layout", "tp=1"),
    )
    assert printed.status == 2
    assert "JSON has no comments; remove them" in " ".join(printed.err.split())


def test_an_unknown_key_of_a_cluster_names_what_may_be_meant(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, meant in (
        ("max_device", "did you mean 'max_devices'?"),
        ("nodes", "known: "),
    ):
        (folder / "cluster.toml").write_text(f'device = "l40s"\n{key} = 4\n')
        printed = run(capsys, *READERS["cluster.toml"])
        assert printed.status == 2
        assert meant in " ".join(printed.err.split())


def test_an_unknown_id_of_a_hub_asks_for_its_configuration(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*CLUSTER, "--global-batch", "8", "--layout", "tp=1")
    printed = run(capsys, "predict", "--model", "some-lab/our-model-7b", *words)
    assert printed.status == 2
    assert "download its config.json and give that file" in " ".join(printed.err.split())
