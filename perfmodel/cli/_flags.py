"""Flags that several commands share, and what they say."""

import argparse
from pathlib import Path

from perfmodel.spec import Job


def add_json(command: argparse.ArgumentParser) -> None:
    """The flag of every command."""
    command.add_argument("--json", action="store_true", help="print one JSON object to stdout and nothing else")


def add_calibration(command: argparse.ArgumentParser) -> None:
    """Which cost models predict."""
    command.add_argument(
        "--calibration",
        type=_calibration,
        metavar="DIR",
        help="directory made by 'perfmodel fit', instead of the shipped one",
    )


def add_job(command: argparse.ArgumentParser, batches: bool = False) -> None:
    """What is predicted, by what, and --json; with `batches` for several global batches."""
    command.add_argument("--model", required=True, help="catalog name, Hugging Face config.json or TOML")
    command.add_argument("--cluster", required=True, help="catalog name or TOML")
    command.add_argument("--devices", type=int, metavar="N", help="devices used (default: what the layout needs)")
    if batches:
        command.add_argument(
            "--global-batch", "--batches", type=_whole_numbers, required=True, metavar="B[,B...]",
            help="sequences per step; several are ranked together",
        )  # fmt: skip
    else:
        command.add_argument("--global-batch", type=int, required=True, metavar="B", help="sequences per step")
    command.add_argument("--seq-len", type=int, metavar="S", help="tokens per sequence (default: the model's)")
    command.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "tf32", "fp8"))
    command.add_argument("--mode", default="train", choices=("train", "inference"))
    command.add_argument(
        "--attention",
        default="flash",
        choices=("flash", "unfused"),
        help="fused attention, or materialised scores",
    )
    command.add_argument("--strict", action="store_true", help="refuse to extrapolate beyond the measurements")
    add_calibration(command)
    add_json(command)


def job_of(arguments: argparse.Namespace, seq_len: int) -> Job:
    """The job that the flags of `add_job` describe, for a model of `seq_len` tokens per sequence."""
    return Job(
        global_batch=arguments.global_batch,
        seq_len=seq_len if arguments.seq_len is None else arguments.seq_len,
        dtype=arguments.dtype,
        mode=arguments.mode,
        flash_attention=arguments.attention == "flash",
    )


def _calibration(text: str) -> Path | None:
    return None if text == "default" else Path(text)


def _whole_numbers(text: str) -> list[int]:
    """Whole numbers above 0 separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, like 1,2,4,8")
    return [int(part) for part in parts]
