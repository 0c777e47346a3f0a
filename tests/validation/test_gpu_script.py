"""The script for a machine with a GPU, as far as a CPU can stand in for one."""

import gpu
import pytest

from perfmodel.errors import PerfModelError

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
STAND_IN = gpu.Card("CPU", "cpu", has_fp8=False, gpus=0)


def test_a_program_by_torchs_kernels_is_right():
    (row,) = gpu.program_table(STAND_IN).to_dict("records")
    assert row["largest relative error"] < 1e-4
    assert row["instructions"] > 10


def test_one_rank_alone_is_timed():
    table = gpu.one_rank_table(STAND_IN)
    assert len(table) == 3
    assert (table["measured, us"] > 0).all()


def test_a_part_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def broken(card: gpu.Card) -> None:
        raise PerfModelError("no driver")

    names = ("one_rank_table", "group_table", "emulation_table", "load_table")
    monkeypatch.setattr(gpu, "kernel_table", lambda card, folder: broken(card))
    for name in names:
        monkeypatch.setattr(gpu, name, broken)
    text, complete = gpu.page(STAND_IN, tmp_path)
    assert not complete
    assert text.count("failed: PerfModelError: no driver") == 5
    assert "training step of an MLP" in text


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    import torch  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PerfModelError, match="no GPU that torch can use; --stand-in"):
        gpu.find_card(stand_in=False)


def test_eight_bits_are_asked_of_cards_that_have_them():
    card = gpu.Card("NVIDIA H100 80GB HBM3", "cuda", has_fp8=True, gpus=1)
    assert card.catalog_name is None or "H100" in card.catalog_name
    dtypes = [op.dtype for op in gpu.kernels(card)]
    assert dtypes.count("fp8") == dtypes[:4].count("bf16") == 4
