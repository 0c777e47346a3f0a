"""Layouts as text, `tp=8,pp=16,dp=8`, and the names that papers and frameworks use."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby, product
from typing import Any, Final

from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError, plain_text
from perfmodel.units import plain_whole

PerStage = tuple[int, ...] | None
"""A whole number per pipeline stage, in model order; written `7-9-9-7`, or `9-10x14-9` where five
or more in a row are equal, and `none` where it is left open."""
PerRank = tuple[str, ...] | None
"""A name per pipeline rank, written `fast-fast-slow`, and `none` where it is left open."""
_DISTSIM = re.compile(r"^([0-9]+)M([0-9]+)P([0-9]+)D$", re.IGNORECASE)
MOST: Final = 10**7
"""Largest number in a layout: more than the devices and layers that any system has."""
MOST_STAGES: Final = 10_000
"""Largest number of stages that one abbreviation may stand for."""
_DEGREES: Final = {
    "tp": ("tensor_parallel", "tensor_model_parallel"),
    "pp": ("pipeline_parallel", "pipeline_model_parallel"),
    "dp": ("data_parallel",),
    "cp": ("context_parallel",),
    "ep": ("expert_parallel", "expert_model_parallel"),
    "etp": ("expert_tensor_parallel",),
}


def _key_aliases() -> dict[str, str]:
    """Long names of keys: those of degrees, alone and as Megatron-LM and DeepSpeed end them, and a
    few others."""
    aliases = {}
    for key, names in _DEGREES.items():
        for name, suffix in product(names, ("", "_size", "_degree")):
            aliases[name + suffix] = key
    aliases |= {
        "micro_batch_size": "micro_batch",
        "zero_stage": "zero",
        "virtual_stages": "vpp",
    }
    aliases["cp_comm_type"] = "cp_kind"
    return aliases


KEY_ALIASES: Final = _key_aliases()
"""Keys of layouts by their long names."""
SCHEDULES: Final = (
    "1f1b",
    "breadth-first",
    "chimera",
    "chimera-doubling",
    "chimera-halving",
    "dualpipe",
    "dualpipe-v",
    "forward",
    "gems",
    "gpipe",
    "interleaved",
    "nf1b",
    "pipedream",
    "pipedream-2bw",
    "pipedream-vertical-sync",
    "seq1f1b",
    "v-half",
    "v-min",
    "zb-h1",
    "zb-h2",
    "zb-v",
)
"""Names of all schedules, listed here because importing `perfmodel.schedule` takes long."""
SCHEDULE_ALIASES: Final = {
    "dapple": "1f1b",
    "pipedream flush": "1f1b",
    "1f 1b": "1f1b",
    "one forward one backward": "1f1b",
    "interleaved 1f1b": "interleaved",
    "1f1b interleaved": "interleaved",
    "1f1b i": "interleaved",
    "interleave": "interleaved",
    "all forward all backward": "gpipe",
    "afab": "gpipe",
    "f then b": "gpipe",
    "fill drain": "gpipe",
    "timeprest": "nf1b",
    "2bw": "pipedream-2bw",
    "bfs": "breadth-first",
    "looped bfs": "breadth-first",
    # The authors search an order within a memory limit; these are their hand-made ones of the same
    # memory.
    "zb 1p": "zb-h1",
    "zb 2p": "zb-h2",
    # All programs here wait for all gradients before an update.
    "zb 2p sync optimizer": "zb-h2",
    "zero bubble h1": "zb-h1",
    "zero bubble h2": "zb-h2",
    "zero bubble v": "zb-v",
    "zbv zero bubble": "zb-v",
    "dual pipe": "dualpipe",
    "dual pipe v": "dualpipe-v",
}
"""Schedules by their names in papers (DAPPLE, Fan et al. 2021; PipeDream-Flush and PipeDream-2BW,
Narayanan et al. 2021; ZB-1p and ZB-2p, Qi et al. 2024; TiMePReSt's is nF1B), in Megatron-LM and
Paddle, and by the names of `torch.distributed.pipelining`. Blanks stand for any separator between
words, or none."""
_SEPARATORS: Final = re.compile(r"[\s_-]+")


def _names_without_separators() -> dict[str, str]:
    """Registered names of schedules by all names, each without the separators between its words."""
    aliases = {name: name for name in SCHEDULES} | SCHEDULE_ALIASES
    return {_SEPARATORS.sub("", alias): name for alias, name in aliases.items()}


_REGISTERED_NAMES: Final = _names_without_separators()


_DRAINED: Final = re.compile(r"(?P<schedule>.*?)\s*\*\s*(?P<drains>[1-9]\d*)")


def schedule_and_drains(name: str) -> tuple[str, int]:
    """The schedule that a name runs through, and how often in a step: `1f1b*4` is 1F1B four times,
    with a pipeline that fills and drains each time."""
    drained = _DRAINED.fullmatch(name.strip())
    # A path may hold any sign.
    if drained is None or name.lower().startswith("file:"):
        return name, 1
    return drained["schedule"], int(drained["drains"])


def with_drains(schedule: str, drains: int) -> str:
    """The name of a schedule that a step runs through so often; the inverse of
    `schedule_and_drains`."""
    return schedule if drains == 1 else f"{schedule}*{drains}"


@lru_cache(1024)
def schedule_name(name: str) -> str:
    """The registered name of a schedule, from any case or a paper's name; unknown names are
    returned unchanged."""
    schedule, drains = schedule_and_drains(name)
    if drains > 1:
        return with_drains(schedule_name(schedule), drains)
    head, colon, number = schedule.strip().partition(":")
    # The name of a file keeps its case.
    if head.lower() == "file":
        return f"file{colon}{number}"
    lower_name = head.strip().lower().replace("_", "-").replace(" ", "-")
    without_separators = _SEPARATORS.sub("", lower_name)
    # PyTorch's classes are called `Schedule1F1B` and so on.
    registered = _REGISTERED_NAMES.get(without_separators.removeprefix("schedule"), lower_name)
    return registered + colon + number.strip()


def read_values(text: str, types: dict[str, Any]) -> dict[str, Any]:
    """Parse the fields that a layout's notation states; `types` has the types of all fields.

    Raises:
        LayoutError: for a value that does not parse, a key that is given twice, or an empty text.
        UnknownNameError: for a key that no layout has.
    """
    if not text.strip(" ,"):
        raise LayoutError("layout: the text is empty; give degrees, such as tp=8,pp=4,dp=2")

    # DistSim's notation (8M16P1D) may begin the text, or be all of it.
    head, comma, remaining = text.strip().partition(",")
    values: dict[str, Any] = {}
    degrees = _DISTSIM.match(head.strip())
    if degrees:
        for key, raw in zip(("tp", "pp", "dp"), degrees.groups(), strict=True):
            values[key] = _whole(key, raw)
        text = remaining
    items = [part.strip() for part in text.split(",")] if comma or text != remaining else []
    if not all(items):
        raise LayoutError(
            f"layout: {text.strip()[:60]!r} has an extra comma, or a missing key=value between two commas"
        )

    last = None
    for item in items:
        # Numbers per stage may be written 6,6,6,6 instead of 6-6-6-6.
        if last and types[last] == PerStage and values[last] and item.isdecimal():
            values[last] = (*values[last], _whole(last, item))
            continue
        name, sign, raw = (part.strip() for part in item.partition("="))
        if not sign:
            raise LayoutError(f"layout: {item!r} is neither key=value nor of the form 8M16P1D")
        key = _key(name, raw, types)
        if key in values:
            raise LayoutError(
                f"layout: {key} is given twice (the second time as {raw!r}); leave one out"
            )
        values[key] = _value(key, raw, types[key])
        last = key
    return values


def written(value: Any) -> str:
    """Format a field's value as `read_values` parses it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "-".join(_in_runs(value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


_SHORTENED: Final = 5
"""Number of equal stages in a row from which they are abbreviated, as in `10x14`."""


def _in_runs(stages: tuple[Any, ...]) -> Iterator[str]:
    """Values of stages as text, `10x14` for many equal ones; names of kinds are never shortened."""
    for value, run in groupby(stages):
        count = len(list(run))
        # `0x8` would be read as a hexadecimal number.
        if count >= _SHORTENED and isinstance(value, int) and value > 0:
            yield f"{value}x{count}"
        else:
            yield from [str(value)] * count


def written_values(values: Mapping[str, Any]) -> str:
    """Format fields in the notation that `read_values` parses."""
    return plain_text(",".join([f"{name}={written(value)}" for name, value in values.items()]))


def _key(name: str, raw: str, types: dict[str, Any]) -> str:
    """The field that a name stands for."""
    lower_name = name.lower().replace("-", "_")
    key = KEY_ALIASES.get(lower_name, lower_name)
    if key in types:
        return key

    # People look for an FSDP degree, but here it is part of dp and zero.
    if key == "fsdp":
        raise LayoutError(
            f"layout: {name} is not a key; for {raw} ranks that shard all states write dp={raw},zero=3, and add "
            "replicate=R for hybrid sharding with R replicas"
        )
    raise UnknownNameError("layout key", name, types)


def _stages(key: str, raw: str) -> tuple[int, ...]:
    """Parse layers per stage, where `10x14` means 14 stages with 10 layers each."""
    stages: list[int] = []
    for part in raw.split("-"):
        # The bound comes before the list is made; a leading zero would make it a hexadecimal
        # number.
        value, times, count = part.partition("x")
        repeats = _whole(key, count) if times else 1
        if not 1 <= repeats <= MOST_STAGES or (times and value.startswith("0")):
            raise LayoutError(
                f"layout: {key} may repeat a stage 1 to {MOST_STAGES:,} times, got {part!r}"
            )
        stages += [_whole(key, value)] * repeats
    return tuple(stages)


def _value(key: str, raw: str, kind: Any) -> Any:
    """Parse a field's value of type `kind`."""
    # A schedule may be a path, whose case counts.
    if key == "schedule":
        return schedule_name(raw)
    if raw.lower() == "none" and kind in (PerStage, PerRank, int | None):
        return None
    if kind == PerStage:
        try:
            return _stages(key, raw)
        except LayoutError:
            raise LayoutError(
                f"layout: {key} must be a whole number per stage, like 7-9-9-7, got {raw!r}"
            ) from None
    if kind == PerRank:
        return tuple(name.strip() for name in raw.lower().split("-"))
    if kind is bool:
        if raw.lower() in ("true", "1", "yes"):
            return True
        if raw.lower() in ("false", "0", "no"):
            return False
        raise LayoutError(f"layout: {key} must be true or false, got {raw!r}")
    if kind in (int, int | None):
        return _whole(key, raw)
    return raw.lower()


def _whole(key: str, raw: str) -> int:
    """A whole number that a layout may have."""
    try:
        value = plain_whole(raw)
    except PerfModelError:
        raise LayoutError(
            f"layout: {key} must be a whole number in plain digits, like 8, got {raw!r}"
        ) from None
    if abs(value) > MOST:
        raise LayoutError(
            f"layout: {key}={raw} is not plausible; no layout has numbers above {MOST:,}"
        )
    return value
