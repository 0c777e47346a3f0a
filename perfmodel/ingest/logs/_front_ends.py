"""The lines in which fine-tuning front ends report a step, and those that Megatron-Bridge adds."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from perfmodel.ingest.logs._log import LoggedStep
from perfmodel.ingest.logs._text import clock_seconds, duration_seconds, number

# ---- dictionaries: MS-Swift, LLaMA-Factory ----

DICTIONARY: Final = re.compile(
    r"""\{.*?['"](?:global_step/max_steps|current_steps)['"]: ['"]?(?P<step>\d+).*?"""
    r"""['"]elapsed_time['"]: ['"](?P<elapsed>[^'"]+)['"]"""
)
_SPEED: Final = re.compile(
    r"""['"]train_speed\((?P<unit>iter/s|s/it)\)['"]: ['"]?(?P<rate>[\d.]+)"""
)


def dictionary_steps(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
    """Lines such as `{"current_steps": 10, ..., "elapsed_time": "0:01:02"}`, timed by what elapsed
    between them.

    MS-Swift prints the mean speed since the start besides, which times the first line.
    """
    before: LoggedStep | None = None
    for line_number, line in enumerate(lines):
        match = DICTIONARY.search(line)
        # Evaluations and the totals at the end repeat the step of the training.
        if match is None or "eval_loss" in line or "train_runtime" in line:
            continue
        step = LoggedStep(step=int(match["step"]), clock_s=duration_seconds(match["elapsed"]))
        # The time since the previous line is that of these steps alone; the printed speed is a mean
        # since the start, in which compilation and warm-up stay.
        seconds = _seconds_between(before, step)
        if seconds is None:
            seconds = _seconds_of_speed(line)
        yield line_number, replace(step, seconds=seconds)
        before = step


def _seconds_between(before: LoggedStep | None, step: LoggedStep) -> float | None:
    """Seconds per step since the line before; None at the beginning and after a restart."""
    if before is None or before.clock_s is None or step.clock_s is None:
        return None
    passed_s, covered = step.clock_s - before.clock_s, step.step - before.step
    return passed_s / covered if passed_s > 0 and covered > 0 else None


def _seconds_of_speed(line: str) -> float | None:
    speed = _SPEED.search(line)
    if speed is None or float(speed["rate"]) == 0:
        return None
    rate = float(speed["rate"])
    return rate if speed["unit"] == "s/it" else 1 / rate


# ---- a heading for each step, with a line for each metric below it ----


def metric_blocks(
    lines: Sequence[str], heading: re.Pattern[str], metric: re.Pattern[str]
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Line number of the heading, step and metrics of each block.

    Args:
        lines: lines of the log.
        heading: matches the line above a block; its first group is the step.
        metric: matches a line of a block; its groups are name and value.
    """
    # A block ends where the next one begins, or with the log.
    block: dict[str, str] = {}
    head_at = step = 0
    for at, line in enumerate(lines):
        head = heading.search(line)
        if head is not None:
            if block:
                yield head_at, step, block
            head_at = at
            step = int(head[1].replace(",", ""))
            block = {}
        field = metric.search(line)
        if field is not None and step:
            block[field[1]] = field[2]
    if block:
        yield head_at, step, block


OLMO: Final = re.compile(r"\[step=([\d,]+)/[\d,]+(?:,[^\]]*)?\]")
_OLMO_METRIC: Final = re.compile(r"\bthroughput/device/(TPS|tokens_per_second)=([\d,.]+)")


def olmo_steps(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
    """Steps of OLMo and OLMo-core: `[step=2/739328]` and, below it,
    `throughput/device/TPS=45,538`."""
    for head_at, step, metrics in metric_blocks(lines, OLMO, _OLMO_METRIC):
        rate = number(metrics.get("TPS", metrics.get("tokens_per_second", "")))
        yield (
            head_at,
            LoggedStep(
                step=step, tokens_per_s_per_device=rate, clock_s=clock_seconds(lines[head_at])
            ),
        )


# ---- one line per step ----

TORCHTUNE: Final = re.compile(r"\bStep (\d+) \| .*?\btokens_per_second_per_gpu:([\d.]+)")
XTUNER: Final = re.compile(r"Iter\(train\) \[ *(\d+)/\d+\].*?\btime: ([\d.]+)")
AUTOMODEL: Final = re.compile(r"\bstep (\d+) \| epoch \d+ \| .*?\btps [\d.,]+ ?\(([\d.,]+)/gpu\)")


def torchtune_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`Step 10 | loss:1.2 lr:2e-05 tokens_per_second_per_gpu:1234.5 ...`, of torchtune's loggers to
    disk or screen."""
    return LoggedStep(
        step=int(match[1]), tokens_per_s_per_device=number(match[2]), clock_s=clock_seconds(line)
    )


def xtuner_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`Iter(train) [  10/1000]  lr: ...  time: 6.19  data_time: 0.01  memory: 61520  loss: ...` of
    mmengine."""
    return LoggedStep(step=int(match[1]), seconds=float(match[2]), clock_s=clock_seconds(line))


def automodel_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`step 7 | epoch 0 | loss ... | mem 61.52 GiB | tps 65432.12(8179.01/gpu)` of NeMo
    AutoModel."""
    return LoggedStep(
        step=int(match[1]), tokens_per_s_per_device=number(match[2]), clock_s=clock_seconds(line)
    )


BRIDGE: Final = re.compile(r"\bStep Time : ([\d.]+)s GPU utilization: ([\d.]+) ?MODEL_TFLOP/s/GPU")


def bridge_steps(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
    """`Step Time : 6.51s GPU utilization: 512.1MODEL_TFLOP/s/GPU`, whose lines have no step number
    and are counted."""
    step = 0
    for line_number, line in enumerate(lines):
        match = BRIDGE.search(line)
        if match is not None:
            step += 1
            yield (
                line_number,
                LoggedStep(
                    step=step,
                    seconds=float(match[1]),
                    tflops_per_device=number(match[2]),
                    clock_s=clock_seconds(line),
                ),
            )
