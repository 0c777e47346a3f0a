"""Degrees and batch of a row of published runs, those that it leaves open from those that it states."""

from dataclasses import dataclass

from perfmodel.validation._row_cells import Row, Unusable, count, number

_DEGREES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class Spread:
    """Degrees, and the batch over them."""

    tp: int
    pp: int
    dp: int
    cp: int
    micro_batch: int
    global_batch: int
    """Whole micro-batches per replica; a smaller last micro-batch is rounded up, as it runs as one."""
    assumed: tuple[str, ...]
    """Names of what nothing in the row tells."""


def spread_of(row: Row, seq_len: int, usual: int = 1) -> Spread:
    """How a row's batch is spread over its devices.

    One degree that is not stated follows from the devices; an empty micro-batch from the micro-batches per replica, and
    is the `usual` one where these are empty too; an empty global batch from micro-batches, or from the tokens per
    second that the source multiplied with the step time.

    Raises:
        Unusable: naming the cells that are missing.
    """
    cp = count(row, "cp", 1)
    degrees = {name: number(row, name) for name in _DEGREES}
    missing = [name for name, value in degrees.items() if value is None]
    known = cp
    for name in _DEGREES:
        known *= 1 if name in missing else count(row, name)
    if len(missing) > 1:
        raise Unusable(f"{', '.join(missing[:-1])} and {missing[-1]} are not stated")
    if missing:
        devices = count(row, "n_devices", 0)
        if not devices or devices % known:
            raise Unusable(f"{missing[0]} is not stated")
    tp, pp, dp = (devices // known if name in missing else count(row, name) for name in _DEGREES)
    per_replica = number(row, "num_microbatches")
    stated = count(row, "global_batch", 0) or _batch_of_throughput(row, seq_len)
    micro_batch, assumed = count(row, "micro_batch", 0), ()
    if not micro_batch:
        follows = stated and per_replica and stated % (dp * per_replica) == 0
        micro_batch = int(stated / (dp * per_replica)) if follows and per_replica else usual
        assumed = () if follows else ("micro_batch",)
    if not stated:
        if per_replica is None:
            raise Unusable("global_batch is not stated")
        stated = dp * micro_batch * count(row, "num_microbatches")
    per_step = dp * micro_batch
    return Spread(tp, pp, dp, cp, micro_batch, -(-stated // per_step) * per_step, assumed)


def _batch_of_throughput(row: Row, seq_len: int) -> int:
    """Sequences per step by tokens per second and device, step time and devices; 0 where they are not all stated."""
    rate, step_s = number(row, "measured_tokens_per_s_per_device"), number(row, "measured_iter_time_s")
    if not rate or not step_s or number(row, "n_devices") is None:
        return 0
    return round(rate * step_s * count(row, "n_devices") / seq_len)
