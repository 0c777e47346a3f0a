"""The lines in which research code reports a step: nanoGPT and what is derived from it, llm.c,
fairseq and PaddleNLP."""

import re
from typing import Final

from perfmodel.ingest.logs._log import LoggedStep
from perfmodel.ingest.logs._text import clock_seconds, number

NANOGPT: Final = re.compile(
    r"\biter (?P<step>\d+): loss [\d.]+,.*?\btime:? (?P<ms>[\d.]+) ?ms\b"
    # llama2.c
    r"|^\W*(?P<numbered>\d+) \| loss [\d.]+ \| lr [\d.e+-]+ \| (?P<passed_ms>[\d.]+) ?ms \| mfu\b"
)
LLM_C: Final = re.compile(
    r"\bstep\s+(?P<step>\d+)/\d+ \| (?:train )?loss .*?\(?(?P<ms>[\d.]+) ms\b.*?\btok/s"
)
FAIRSEQ: Final = re.compile(
    r"""(?<!_)\bwps["']?[=:]\s*["']?(?P<words_per_s>[\d.e+]+).*?"""
    r"""(?<!_)\bwpb["']?[=:]\s*["']?(?P<words>[\d.e+]+).*?"""
    r"""(?<!_)\bnum_updates["']?[=:]\s*["']?(?P<step>\d+)"""
)
_WALL: Final = re.compile(r"""(?<!_)\bwall["']?[=:]\s*["']?(?P<seconds>[\d.e+]+)""")
PADDLE: Final = re.compile(
    r"\bglobal_step: (?P<step>\d+), .*?\binterval_runtime: (?P<seconds>[\d.]+), .*?"
    r"\binterval_steps_per_second: (?P<steps_per_s>[\d.]+)"
)


def nanogpt_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`iter 340: loss 5.4983, time 1378.52ms, mfu 45.1%`, or, in llama2.c,
    `340 | loss 5.5 | lr 1e-4 | 1378.52ms | mfu 45.1%`."""
    # Iterations are numbered from 0.
    return LoggedStep(
        step=int(match["step"] or match["numbered"]) + 1,
        seconds=float(match["ms"] or match["passed_ms"]) / 1000,
        clock_s=clock_seconds(line),
    )


def llm_c_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`step   61/74 | loss 3.2 (+nanz)| norm 1.4 (+nanz)| lr 3.00e-04 | 44.57 ms | 48.1% bf16 MFU |
    91886 tok/s`."""
    return LoggedStep(
        step=int(match["step"]), seconds=float(match["ms"]) / 1000, clock_s=clock_seconds(line)
    )


def fairseq_step(line: str, match: re.Match[str]) -> LoggedStep | None:
    """`epoch 001:    450 / 1891 loss=11.5, wps=52922, ups=0.5, wpb=104928, bsz=5325,
    num_updates=445, ...`, or the same as a JSON object, as metaseq writes it too."""
    # Updates per second (`ups`) have two digits behind the point: words of an update and words per
    # second tell the time of slow updates exactly.
    words_per_s = number(match["words_per_s"])
    words = number(match["words"])
    if not words_per_s or not words:
        return None
    clock_s = clock_seconds(line)
    wall = _WALL.search(line)
    if clock_s is None and wall is not None:
        clock_s = number(wall["seconds"])
    return LoggedStep(step=int(match["step"]), seconds=words / words_per_s, clock_s=clock_s)


def paddle_step(line: str, match: re.Match[str]) -> LoggedStep:
    """`loss: 3.2, learning_rate: 3e-05, global_step: 10, interval_runtime: 22.591,
    interval_samples_per_second: 3.541, interval_steps_per_second: 0.443, epoch: 0.02`."""
    seconds, steps_per_s = float(match["seconds"]), float(match["steps_per_s"])
    # The rate has four digits behind the point, too few for slow steps, but it tells how many steps
    # the time is of.
    steps = max(1, round(seconds * steps_per_s))
    return LoggedStep(step=int(match["step"]), seconds=seconds / steps, clock_s=clock_seconds(line))
