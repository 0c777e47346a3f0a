"""Fitted JSON files of the package are read only while they agree with their checksums."""

import json
import random
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import perfmodel
from perfmodel.cli import main
from perfmodel.errors import CalibrationError
from perfmodel.files import CHECKSUMS_FILE, checksum_lines, read_checked
from perfmodel.prediction.sites import _population
from perfmodel.prediction.sites import constants as _site_constants
from perfmodel.session import current_session
from perfmodel.validation.unstated import priors as _priors

PACKAGE = Path(perfmodel.__file__).parent
FOLDERS = ("prediction/sites", "validation")
FILES = [
    (folder, path.name) for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.json"))
]
READERS: dict[str, tuple[ModuleType, Any]] = {
    "memory.json": (_site_constants, _site_constants.source_figures),
    "population.json": (_population, _population._fitted),
    "sustained.json": (_site_constants, _site_constants.source_medians),
    "choice_priors.json": (_priors, _priors._shipped),
}
"""By file the module that reads it, and its reader, which remembers what it read."""


def copy(folder: str, to: Path) -> Path:
    for path in (PACKAGE / folder).iterdir():
        if path.suffix in (".json", ".sha256"):
            shutil.copy(path, to / path.name)
    return to


@pytest.mark.parametrize("folder", FOLDERS)
def test_checksums_are_those_of_the_shipped_files(folder: str) -> None:
    """Fails after a fitted file was changed without `make checksums`."""
    assert (PACKAGE / folder / CHECKSUMS_FILE).read_text() == checksum_lines(PACKAGE / folder)


def test_every_fitted_file_has_a_reader_that_checks_it() -> None:
    assert {name for _, name in FILES} == set(READERS)


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_any_flipped_bit_is_refused_by_name(folder: str, name: str, tmp_path: Path) -> None:
    path = copy(folder, tmp_path) / name
    content = path.read_bytes()
    assert read_checked(tmp_path, name) == content
    draw = random.Random(name)
    for _ in range(20):
        bit = draw.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CalibrationError, match=name) as error:
            read_checked(tmp_path, name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_the_reader_of_a_file_refuses_another_number(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is still valid JSON, which nothing but a checksum notices."""
    module, read = READERS[name]
    path = copy(folder, tmp_path) / name
    text = path.read_text()
    place = next(
        i
        for i in range(len(text) // 2, len(text))
        if text[i] in "12345678" and text[i - 1] in "123456789."
    )
    path.write_text(text[:place] + "9" + text[place + 1 :])
    json.loads(path.read_text())
    monkeypatch.setattr(module, "files", lambda _: tmp_path)
    read.cache_clear()
    try:
        with pytest.raises(CalibrationError, match=name):
            read()
        # written on purpose, it is read again once its checksum is
        (tmp_path / CHECKSUMS_FILE).write_text(checksum_lines(tmp_path))
        assert read()
    finally:
        read.cache_clear()


def test_a_prediction_with_a_damaged_file_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy("prediction/sites", tmp_path)
    (tmp_path / CHECKSUMS_FILE).unlink()
    monkeypatch.setattr(_population, "files", lambda _: tmp_path)
    caches = (_population._fitted, _population.population)
    # a session that has predicted this step before would answer from what it kept
    current_session().clear()
    for cache in caches:
        cache.cache_clear()
    command = "predict --model gpt3-1.3b --cluster dgx-a100 --global-batch 16 --layout tp=2,dp=4"
    try:
        assert main(command.split()) == 2
    finally:
        for cache in caches:
            cache.cache_clear()
    error = capsys.readouterr().err.strip()
    assert CHECKSUMS_FILE in error
    assert "\n" not in error
