"""A weights file that changed by a single bit is refused by name, shipped or fitted, wherever the
bit lies."""

import random
from pathlib import Path

import pytest

from perfmodel.cost.learn import (
    END_TO_END_FILE,
    load_regressor,
    save_regressor,
    shipped_folder,
    weight_files,
)
from perfmodel.cost.learn.collectives import FILE_NAME, collective_weights, save_collective_weights
from perfmodel.errors import CalibrationError
from perfmodel.files import UNSEALED, require_intact, sealed
from perfmodel.prediction.sites import adjustments, save_adjustments

SHIPPED = sorted(path.name for path in shipped_folder().glob("*.safetensors"))


def read(folder: Path, name: str) -> object:
    if name == FILE_NAME:
        return collective_weights(weight_files(folder))
    return load_regressor(folder / name)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_flipped_bit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content = (shipped_folder() / name).read_bytes()
    draw = random.Random(name)
    header_bits, all_bits = 8 * 2000, 8 * len(content)
    for bit in [draw.randrange(header_bits) for _ in range(6)] + [
        draw.randrange(all_bits) for _ in range(6)
    ]:
        (tmp_path / name).write_bytes(flipped(content, bit))
        with pytest.raises(CalibrationError, match=name) as error:
            read(tmp_path, name)
        assert "\n" not in str(error.value)


def test_what_is_written_anew_is_read_and_a_file_without_checksum_is_not(tmp_path: Path) -> None:
    path = save_regressor(load_regressor(shipped_folder() / "optimizer.safetensors"), tmp_path)
    load_regressor(path)
    path.write_bytes(path.read_bytes().replace(b"perfmodel-sha256:", b"perfmodel-sha255:"))
    with pytest.raises(CalibrationError, match="has no checksum; fit it again"):
        load_regressor(path)
    save_collective_weights(collective_weights(weight_files(None)), tmp_path / FILE_NAME)
    assert collective_weights(weight_files(tmp_path)).series


def test_the_same_weights_are_the_same_bytes(tmp_path: Path) -> None:
    regressor = load_regressor(shipped_folder() / "optimizer.safetensors")
    collectives = collective_weights(weight_files(None))
    files = []
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        kernels = save_regressor(regressor, tmp_path / folder)
        save_collective_weights(collectives, tmp_path / folder / FILE_NAME)
        files.append((kernels.read_bytes(), (tmp_path / folder / FILE_NAME).read_bytes()))
    assert files[0] == files[1] == files[2]


def test_parameters_of_runs_are_sealed_too(tmp_path: Path) -> None:
    path = save_adjustments(tmp_path, {})
    assert path.name == END_TO_END_FILE
    assert adjustments(weight_files(tmp_path)) == {}
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 37):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(CalibrationError, match=END_TO_END_FILE):
            adjustments(weight_files(tmp_path))


def test_the_checksum_covers_every_byte_of_a_file() -> None:
    content = sealed(b"head " + UNSEALED.encode() + b" tail")
    require_intact(content, "file")
    for bit in range(8 * len(content)):
        with pytest.raises(CalibrationError, match=r"^file: "):
            require_intact(flipped(content, bit), "file")
