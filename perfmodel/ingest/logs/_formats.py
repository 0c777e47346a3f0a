"""The lines in which training frameworks report a step."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.ingest.logs._clocks import timed_by_spans, timed_by_stamps
from perfmodel.ingest.logs._front_ends import (
    AUTOMODEL,
    BRIDGE,
    DICTIONARY,
    OLMO,
    TORCHTUNE,
    XTUNER,
    automodel_step,
    bridge_steps,
    dictionary_steps,
    metric_blocks,
    olmo_steps,
    torchtune_step,
    xtuner_step,
)
from perfmodel.ingest.logs._log import LoggedStep
from perfmodel.ingest.logs._research_code import (
    FAIRSEQ,
    LLM_C,
    NANOGPT,
    PADDLE,
    fairseq_step,
    llm_c_step,
    nanogpt_step,
    paddle_step,
)
from perfmodel.ingest.logs._text import clock_seconds, duration_seconds, number, piped_fields


@dataclass(frozen=True, kw_only=True)
class LogFormat:
    """The form in which one framework reports steps."""

    name: str
    marks: re.Pattern[str]
    """Text found in every line about a step, and in no line of another framework."""
    read: Callable[[Sequence[str]], Iterator[tuple[int, LoggedStep]]]
    """Function that yields (line number, step) for each line about a step."""
    retime: Callable[[Mapping[int, LoggedStep]], dict[int, LoggedStep]] = dict
    """Times the steps by the log's clock, if the printed times do not cover whole steps."""


def _by_line(
    pattern: re.Pattern[str], read_line: Callable[[str, re.Match[str]], LoggedStep | None]
) -> Callable[[Sequence[str]], Iterator[tuple[int, LoggedStep]]]:
    """A reader of logs in which a step is one line."""

    def read(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
        for at, line in enumerate(lines):
            match = pattern.search(line)
            step = None if match is None else read_line(line, match)
            if step is not None:
                yield at, step

    return read


_FIELD_MEANINGS: Final[dict[str, tuple[str, float]]] = {
    "elapsed_time_per_iteration_ms": ("seconds", 1e-3),
    # The Megatron-DeepSpeed of BLOOM
    "elapsed_time_per_iteration_s": ("seconds", 1.0),
    "tflops": ("tflops_per_device", 1.0),
    "time_per_iteration_ms": ("seconds", 1e-3),
    "train_step_timing_in_s": ("seconds", 1.0),
    "throughput_per_gpu_tflop_s_gpu": ("tflops_per_device", 1.0),
    "model_tflops_per_gpu": ("tflops_per_device", 1.0),
    "tflops_per_gpu": ("tflops_per_device", 1.0),
    "tokens_per_sec_per_gpu": ("tokens_per_s_per_device", 1.0),
    "tokens_per_gpu_per_second_tgs": ("tokens_per_s_per_device", 1.0),
    "global_batch_size": ("global_batch", 1.0),
    "loss_scale": ("loss_scale", 1.0),
    "number_of_skipped_iterations": ("skipped_steps", 1.0),
}
"""Field of a line with bars -> field of `LoggedStep`, and the factor on its value."""
_WHOLE: Final = ("global_batch", "skipped_steps")


def _piped_step(line: str, match: re.Match[str]) -> LoggedStep:
    """A line of `name: value` fields with bars between them, as Megatron-LM, NeMo and nanotron
    write it."""
    values: dict[str, Any] = {}
    for name, text in piped_fields(line).items():
        value = number(text)
        if name not in _FIELD_MEANINGS or value is None:
            continue
        meaning, scale = _FIELD_MEANINGS[name]
        # Three digits do not tell a batch of 1,024 from one of 1,020: better none than a wrong one.
        if meaning == "global_batch" and text.strip()[-1:].isalpha():
            continue
        scaled = value * scale
        values[meaning] = round(scaled) if meaning in _WHOLE else scaled
    return LoggedStep(step=round(float(match[1])), clock_s=clock_seconds(line), **values)


def _titan_step(line: str, match: re.Match[str]) -> LoggedStep:
    # torchtitan's tps (before 2025 wps) are tokens per second and device, over the steps since the
    # last line.
    rate = re.search(r"\b(?:tps|wps):\s*([\d,]+(?:\.\d+)?)", line)
    tflops = re.search(r"\btflops:\s*([\d,.]+)", line)
    return LoggedStep(
        step=int(match[1].replace(",", "")),
        tokens_per_s_per_device=number(rate[1]) if rate else None,
        tflops_per_device=number(tflops[1]) if tflops else None,
        clock_s=clock_seconds(line),
    )


def _maxtext_step(line: str, match: re.Match[str]) -> LoggedStep:
    return LoggedStep(
        # MaxText numbers steps from 0.
        step=int(match[1]) + 1,
        seconds=float(match[2]),
        tflops_per_device=number(match[3]),
        tokens_per_s_per_device=number(match[4] or ""),
        clock_s=clock_seconds(line),
    )


def _deepspeed_step(line: str, match: re.Match[str]) -> LoggedStep | None:
    if match["pipeline_step"]:
        return LoggedStep(
            step=int(match["pipeline_step"]),
            seconds=float(match["seconds"]),
            clock_s=clock_seconds(line),
        )
    rate = number(match["rate"])
    if not rate:
        return None
    if match["local_step"]:
        # Older versions count micro-batches: the clock between two lines does not give the time of
        # a step.
        return LoggedStep(step=int(match["local_step"]), samples_per_s=rate)
    return LoggedStep(step=int(match["step"]), samples_per_s=rate, clock_s=clock_seconds(line))


def _bar_step(match: re.Match[str]) -> LoggedStep:
    """A step from a state of a progress bar, whose rate is a moving mean of the last steps."""
    rate = float(match["rate"])
    # tqdm turns its rate over where a step takes longer than a second.
    seconds: float | None = rate
    if not match["unit"].startswith("s/"):
        seconds = 1 / rate if rate else None
    step = number(match["step"])
    return LoggedStep(
        step=round(step or 0), seconds=seconds, clock_s=duration_seconds(match["elapsed"])
    )


def _trainer_steps(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
    """Steps from the training's own progress bar; bars of evaluations have another total."""
    bars: list[tuple[int, re.Match[str]]] = []
    for line_number, line in enumerate(lines):
        bar = _HF_BAR.search(line)
        if bar:
            bars.append((line_number, bar))
    # Training has more steps than an evaluation has batches: its total is the one that is shown
    # most often.
    totals = Counter(bar["total"] for _, bar in bars)
    training_total = max(totals, key=totals.__getitem__) if totals else ""
    for line_number, bar in bars:
        if bar["total"] == training_total:
            yield line_number, _bar_step(bar)


_COMPOSER_HEAD: Final = re.compile(r"\[batch=([\d,]+)/[\d,]+\]:?")
_COMPOSER_FIELD: Final = re.compile(r"Train ([\w/-]+):\s*(\S+)")


def _composer_steps(lines: Sequence[str]) -> Iterator[tuple[int, LoggedStep]]:
    """Steps from blocks with a heading `[batch=10/1000]:` and a line for each metric."""
    for head_at, step, metrics in metric_blocks(lines, _COMPOSER_HEAD, _COMPOSER_FIELD):
        yield head_at, _composer_step(step, metrics, lines[head_at])


def _composer_step(step: int, metrics: dict[str, str], head: str) -> LoggedStep:
    """Times and rates that Composer logged for one step."""
    batches_per_s = number(metrics.get("throughput/batches_per_sec", ""))
    # Four decimals are too few for steps of several seconds, of which more samples and tokens pass
    # in each.
    samples_per_s = number(metrics.get("throughput/samples_per_sec", ""))
    tokens_per_s = number(metrics.get("throughput/device/tokens_per_sec", ""))
    # Time of training and evaluations together, in hours unless SpeedMonitor is set to another
    # unit.
    wall_clock_h = number(metrics.get("wall_clock/total", ""))
    clock_s = clock_seconds(head)
    if clock_s is None and wall_clock_h is not None:
        clock_s = wall_clock_h * 3600
    coarse = batches_per_s is not None and batches_per_s < 1 and (tokens_per_s or samples_per_s)
    return LoggedStep(
        step=step,
        seconds=1 / batches_per_s if batches_per_s and not coarse else None,
        samples_per_s=samples_per_s,
        tokens_per_s_per_device=tokens_per_s,
        clock_s=clock_s,
    )


_MEGATRON: Final = re.compile(
    r"(?<!\w)iteration\s*[:=]?\s*(\d+)\s*/\s*\d+\s*\|(?=.*elapsed.time.per.iteration)"
)
_NEMO: Final = re.compile(r"global_step[:=]\s*([\d.]+)(?=.*train_step_timing in s[:=])")
_NANOTRON: Final = re.compile(
    r"iteration:\s*(\d+)\s*/\s*\d+\s*\|(?=.*consumed_tokens:)(?=.*(?:elapsed_)?time_per_iteration_ms:)"
)
_TITAN: Final = re.compile(
    r"\bstep:\s*([\d,]+)(?:/[\d,]+\s*=\s*[\d.]+%)?\s+loss:(?=.*\b(?:tps|wps):)"
)
_MAXTEXT: Final = re.compile(
    r"completed step:\s*(\d+), seconds:\s*([\d.]+), TFLOP/s(?:/device)?:\s*([\d.]+)"
    r"(?:, Tokens/s/device:\s*([\d.]+))?"
)
_DEEPSPEED: Final = re.compile(
    r"(?:global_step=(?P<step>\d+)|\b\d+/(?P<local_step>\d+)), "
    r"(?:RunningAvgSamplesPerSec=[^,]*,\s*Curr)?SamplesPerSec=(?P<rate>[^,\s]+)"
    r"|steps: (?P<pipeline_step>\d+) loss: \S+ iter time \(s\): (?P<seconds>[\d.]+)"
)
_HF_BAR: Final = re.compile(
    r"%\|[^|]*\|\s*(?P<step>\d+)/(?P<total>\d+) "
    r"\[(?P<elapsed>(?:\d+ days?, )?[\d:]+)<(?:\d+ days?, )?[^,\]]*,\s*(?P<rate>[\d.]+)"
    r"(?P<unit>s/it|it/s|s/ba|ba/s)"
)
_LEVANTER: Final = re.compile(
    r"Progress on:train (?P<step>[\d.]+k?)it/\S+ rate:(?P<rate>[\d.]+)(?P<unit>it/s|s/it).*?"
    r"elapsed:(?P<elapsed>(?:\d+ days?, )?[\d:]+)"
)

FORMATS: Final = (
    LogFormat(name="nanotron", marks=_NANOTRON, read=_by_line(_NANOTRON, _piped_step)),
    LogFormat(name="megatron", marks=_MEGATRON, read=_by_line(_MEGATRON, _piped_step)),
    LogFormat(name="nemo", marks=_NEMO, read=_by_line(_NEMO, _piped_step)),
    LogFormat(name="torchtitan", marks=_TITAN, read=_by_line(_TITAN, _titan_step)),
    LogFormat(name="maxtext", marks=_MAXTEXT, read=_by_line(_MAXTEXT, _maxtext_step)),
    LogFormat(name="composer", marks=_COMPOSER_HEAD, read=_composer_steps),
    LogFormat(name="olmo-core", marks=OLMO, read=olmo_steps),
    LogFormat(
        name="levanter",
        marks=_LEVANTER,
        read=_by_line(_LEVANTER, lambda _, match: _bar_step(match)),
        retime=timed_by_spans,
    ),
    LogFormat(
        name="deepspeed",
        marks=_DEEPSPEED,
        read=_by_line(_DEEPSPEED, _deepspeed_step),
        retime=timed_by_stamps,
    ),
    LogFormat(name="megatron", marks=BRIDGE, read=bridge_steps),
    LogFormat(name="nemo-automodel", marks=AUTOMODEL, read=_by_line(AUTOMODEL, automodel_step)),
    LogFormat(name="torchtune", marks=TORCHTUNE, read=_by_line(TORCHTUNE, torchtune_step)),
    LogFormat(name="xtuner", marks=XTUNER, read=_by_line(XTUNER, xtuner_step)),
    LogFormat(name="paddlenlp", marks=PADDLE, read=_by_line(PADDLE, paddle_step)),
    LogFormat(name="llm.c", marks=LLM_C, read=_by_line(LLM_C, llm_c_step)),
    LogFormat(name="nanogpt", marks=NANOGPT, read=_by_line(NANOGPT, nanogpt_step)),
    LogFormat(name="fairseq", marks=FAIRSEQ, read=_by_line(FAIRSEQ, fairseq_step)),
    LogFormat(name="hf-trainer", marks=_HF_BAR, read=_trainer_steps, retime=timed_by_spans),
    LogFormat(name="hf-trainer", marks=DICTIONARY, read=dictionary_steps, retime=timed_by_spans),
)
"""Formats in the order in which they are tried: Megatron-DeepSpeed logs hold lines of DeepSpeed
too, and DeepSpeed under the Trainer of Hugging Face a progress bar."""
