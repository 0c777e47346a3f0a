"""How a row of published runs says that replicas shard model states: its stage, and over how many of them."""

import re
from typing import Any, Final

from perfmodel.validation._row_cells import Row, count, number, text

_STAGES: Final = (
    (r"shard_grad_op", 2), (r"fsdp|hsdp|full.shard", 3), (r"distributed optimizer|distopt", 1), (r"^none$", 0),
)  # fmt: skip
"""Words of `sharding` for ZeRO stages, beside `ZeRO-N`; the first match counts."""
_GROUP: Final = re.compile(r"over (\d+) (?:data )?(?:ranks|devices)|\(size (\d+)\)|group (\d+)|fsdp (\d+)\b")


def framework_name(row: Row) -> str:
    """The framework of a row, as `name@year`: DeepSpeed's own ZeRO is DeepSpeed's, whatever else the column names, and
    Megatron-DeepSpeed on Gaudi is Habana's fork."""
    name = text(row, "framework")
    if name.startswith("megatron-deepspeed") and text(row, "device").lower().startswith("gaudi"):
        return name.replace("megatron-deepspeed", "megatron-deepspeed-gaudi")
    if "deepspeed" not in text(row, "sharding").lower() or "deepspeed" in name or not name:
        return name
    return f"deepspeed{name[name.index('@') :]}" if "@" in name else "deepspeed"


def sharding_of(row: Row, dp: int, pp: int) -> dict[str, Any]:
    """Fields `zero` and `replicate` of a layout that a row's `zero_stage` and `sharding` state; neither where they say
    nothing.

    Weights that FSDP shards stay gathered between the micro-batches of a pipeline (arXiv 2407.21783, section 3.3.2;
    torchtitan's default). `HSDP` without a number shards inside a node.

    Raises:
        Unusable: a `zero_stage` that is no whole number.
    """
    words, found = text(row, "sharding").lower(), {}
    named = re.search(r"zero-(\d)", words)
    if number(row, "zero_stage") is not None:
        found["zero"] = count(row, "zero_stage", least=0)
    elif named:
        found["zero"] = int(named[1])
    elif (stage := next((stage for word, stage in _STAGES if re.search(word, words)), None)) is not None:
        found["zero"] = stage
    if pp > 1 and "fsdp" in words:
        found["zero"] = min(found["zero"], 2)
    group = _GROUP.search(words)
    ranks = int(next(filter(None, group.groups()))) if group else 0
    if "hsdp" in words and not group:
        ranks = max(1, count(row, "devices_per_node", 8) // count(row, "tp", 1))
    if found.get("zero", 1) and 0 < ranks < dp and dp % ranks == 0:
        found["replicate"] = dp // ranks
    return found
