"""DualPipe and DualPipe-V: forwards and backwards of opposite chunks in pairs (DeepSeek-V3, section 3.2.1)."""

from collections.abc import Iterator

from perfmodel.errors import LayoutError
from perfmodel.schedule._bidirectional import bidirectional_stages, even_pipelines
from perfmodel.schedule._construct import Work, from_orders, v_stages
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule


def _enough_for_both_ways(devices: int, micro_batches: int, chunks: int) -> None:
    even_pipelines(devices, micro_batches, chunks)
    if micro_batches % 2 or micro_batches < devices:
        raise LayoutError(
            f"schedule dualpipe on {devices} devices needs an even number of at least {devices} micro-batches, "
            f"got {micro_batches}"
        )


@register("dualpipe", stage_map=bidirectional_stages, chunks=2, plain=False, demands=_enough_for_both_ways)
def dualpipe(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Two directions over p devices; device d holds stages d and p - 1 - d, half the micro-batches go each way."""
    half, each = devices // 2, micro_batches // 2
    orders = []
    for device in range(devices):
        mirrored = device >= half
        # seen from its own end of the pipeline a device runs the passes of DualPipe-V on p / 2 devices; its
        # first chunk takes the micro-batches that enter at that end
        own = _v_order(half, each if each >= 2 * half else 2 * half, min(device, devices - 1 - device))
        kept = _struck_out(own, each)
        orders.append(
            [w._replace(chunk=w.chunk ^ mirrored, micro_batch=2 * w.micro_batch + (w.chunk ^ mirrored)) for w in kept]
        )
    return from_orders("dualpipe", bidirectional_stages(devices, chunks), micro_batches, orders)


@register("dualpipe-v", stage_map=v_stages, chunks=2, plain=False)
def dualpipe_v(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """DualPipe cut in half: one direction over a V of 2 p stages; fewer than 2 p micro-batches are struck out."""
    orders = [
        _struck_out(_v_order(devices, max(micro_batches, 2 * devices), device), micro_batches)
        for device in range(devices)
    ]
    return from_orders("dualpipe-v", v_stages(devices, chunks), micro_batches, orders)


def _struck_out(order: list[Work], micro_batches: int) -> list[Work]:
    """The order without micro-batches that are not there; what was paired with one of them runs alone."""
    kept = []
    for work, after in zip(order, [*order[1:], None], strict=True):
        if work.micro_batch < micro_batches:
            alone = after is None or after.micro_batch >= micro_batches
            kept.append(work._replace(paired=work.paired and not alone))
    return kept


def _v_order(devices: int, micro_batches: int, device: int) -> list[Work]:
    """One device's passes in the eight phases of DeepSeek's schedule, for at least 2 p micro-batches.

    In the steady phase a forward of one chunk and a backward of the other run as a pair. Input gradients
    are split from weight gradients only where these fill a bubble.
    """
    later = devices - 1 - device
    forward, backward = [iter(range(micro_batches)) for _ in range(2)], [iter(range(micro_batches)) for _ in range(2)]
    order: list[Work] = []
    waiting: list[Work] = []

    def run_forward(chunk: int, paired: bool = False) -> None:
        order.append(Work(Phase.FORWARD, chunk, next(forward[chunk]), paired=paired))

    def run_backward(chunk: int, split: bool = False) -> None:
        micro_batch = next(backward[chunk])
        order.append(Work(Phase.BACKWARD_INPUT if split else Phase.BACKWARD, chunk, micro_batch))
        if split:
            waiting.append(Work(Phase.BACKWARD_WEIGHT, chunk, micro_batch))

    def run_pair(forward_chunk: int) -> None:
        run_forward(forward_chunk, paired=True)
        run_backward(1 - forward_chunk)

    def run_weight() -> None:
        order.append(waiting.pop(0))

    for _ in range(2 * later):
        run_forward(0)
    for _ in range(device + 1):
        run_forward(0)
        run_forward(1)
    for _ in range(later):
        run_backward(1, split=True)
        run_weight()
        run_forward(1)
    for _ in range(micro_batches - 2 * devices + device + 1):
        run_pair(0)
        run_pair(1)
    for _ in range(later):
        run_backward(1)
        run_pair(1)
    for chunk, split in _last_backwards(device + 1):
        run_backward(chunk, split)
    for _ in range(later):
        run_weight()
        run_backward(0, split=True)
    while waiting:
        run_weight()
    return order


def _last_backwards(pairs: int) -> Iterator[tuple[int, bool]]:
    """Chunks of the last backwards in turn; the second half is split, to leave weight gradients for later."""
    for i in range(2 * pairs):
        yield (i + 1) % 2, i >= pairs
