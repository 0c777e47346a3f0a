"""Pipelines in both directions over the same devices.

Chimera, its forward doubling and backward halving, GEMS; and DualPipe with its half, DualPipe-V,
where forwards and backwards of opposite chunks run in pairs (DeepSeek-V3, section 3.2.1).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import LayoutError
from perfmodel.schedule._construct import Work, arrange, from_keys, from_orders
from perfmodel.schedule._registry import register, v_stages
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.units import divisors


def bidirectional_stages(devices: int, chunks: int) -> Int[np.ndarray, "devices chunks"]:
    """Stage maps of 2k pipelines (Chimera, section 3.6): chunk 2i goes down, chunk 2i + 1 up.

    Down pipeline i has stage 0 on device i p / k; up pipeline i maps stages in the opposite order.
    """
    d = np.arange(devices)[:, None]
    i = np.arange(chunks) // 2
    first_device = i * (2 * devices // chunks)
    down = (d - first_device) % devices
    up = (devices - 1 - d - first_device) % devices
    return np.where(np.arange(chunks) % 2, up, down)


def even_pipelines(devices: int, micro_batches: int, pipelines: int) -> None:
    """Raise `LayoutError` unless these pipelines fit the devices, half in each direction."""
    if devices % 2:
        raise LayoutError(
            f"bidirectional schedules need an even number of pipeline stages, got {devices}"
        )
    if pipelines % 2 or (devices // 2) % (pipelines // 2):
        good = [2 * k for k in divisors(devices // 2)]
        raise LayoutError(
            f"{pipelines} pipelines are not possible with {devices} stages; use one of "
            f"{', '.join(map(str, good))} pipelines"
        )
    if 2 < pipelines > micro_batches:
        raise LayoutError(
            f"{pipelines} pipelines need at least {pipelines} micro-batches, got {micro_batches}"
        )


@register(
    "chimera", stage_map=bidirectional_stages, chunks=2, number="pipelines", demands=even_pipelines
)
def chimera(devices: int, micro_batches: int, chunks: int, *_: int) -> Schedule:
    """2k pipelines, half of them in each direction (Li and Hoefler 2021, sections 3.1, 3.5 and
    3.6).

    Each runs p / 2k micro-batches of a basic unit of p by 1F1B. Slots of unit time: stage s runs
    the forward of the j-th micro-batch of its pipeline at s + 2 j, and the backward at 2 p - 1 - s
    + 2 j. On every device these of all pipelines fall on different slots, and so do those of the
    next unit, 2 p slots later: units are concatenated directly (section 3.5). Of a unit that is not
    full (m < p, or a remainder) the missing micro-batches are struck out, evenly from all
    pipelines.
    """
    p, m, pipelines = devices, micro_batches, chunks
    stage = bidirectional_stages(p, pipelines)

    # A unit's micro-batches are dealt to the pipelines in turn.
    i = np.arange(m)
    unit, place = np.divmod(i, p)
    in_pipeline = place % pipelines == np.arange(pipelines)[:, None]
    start = 2 * p * unit + 2 * (place // pipelines)
    forward = np.where(in_pipeline, stage[:, :, None] + start, -1)
    backward = np.where(in_pipeline, 2 * p - 1 - stage[:, :, None] + start, -1)
    return from_keys("chimera", stage, {Phase.FORWARD: forward, Phase.BACKWARD: backward})


@register("gems", stage_map=bidirectional_stages, chunks=2)
def gems(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Two replicas in opposite directions; the forward of a micro-batch follows the backward of the
    one before, so that a device never holds more than one (Jain et al. 2020, GEMS-MAST)."""
    # Micro-batches alternate between the replicas, and each is done before the next begins.
    stage = bidirectional_stages(devices, chunks)
    i = np.arange(micro_batches)
    in_pipeline = np.broadcast_to(
        i % chunks == np.arange(chunks)[:, None], (devices, chunks, micro_batches)
    )
    forward = np.where(in_pipeline, 2 * i, -1)
    backward = np.where(in_pipeline, 2 * i + 1, -1)
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("gems", stage, keys)


@register(
    "chimera-doubling",
    stage_map=bidirectional_stages,
    chunks=2,
    plain=False,
    demands=even_pipelines,
)
def forward_doubling(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Chimera's forward doubling: forwards of two micro-batches at once take about as long as one
    backward.

    Forwards come first, those of later stages before those of earlier ones, as long as the device
    holds no more than p pairs of micro-batches; otherwise backwards. Of a device's 3 m / 2 + p - 2
    slots p - 2 are idle: the middle bubbles of direct concatenation are gone. Activations are
    doubled, so this goes with recomputation. Up to p micro-batches are one unit, which has no
    middle and stays as it is.
    """
    return _doubled("chimera-doubling", devices, micro_batches, chunks)


@register(
    "chimera-halving", stage_map=bidirectional_stages, chunks=2, plain=False, demands=even_pipelines
)
def backward_halving(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Forward doubling at half micro-batches: the same order, but a micro-batch is half of a
    forward's input.

    Backwards run on halves, and activations are not doubled. `micro_batches` counts the halves, so
    that a step of as many sequences has twice the micro-batches of half the size of any other
    schedule.
    """
    return _doubled("chimera-halving", devices, micro_batches, chunks)


def _doubled(name: str, devices: int, micro_batches: int, chunks: int) -> Schedule:
    """The order of doubling and halving: forwards of pairs, backwards one by one."""
    if micro_batches <= devices:
        return replace(chimera(devices, micro_batches, chunks), name=name)

    # Pairs of micro-batches alternate between the pipelines. Keys give the order inside each queue
    # alone.
    stage = bidirectional_stages(devices, chunks)
    i = np.arange(micro_batches)
    in_pipeline = np.broadcast_to(
        i // 2 % chunks == np.arange(chunks)[:, None], (devices, chunks, micro_batches)
    )
    forward = np.where(in_pipeline & (i % 2 == 0), i, -1)
    backward = np.where(in_pipeline, micro_batches + i, -1)
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    pool = from_keys(name, stage, keys, spans={Phase.FORWARD: 2})

    # Forwards go before backwards, later stages before earlier ones, micro-batches in their order:
    # three digits of one number.
    is_backward = pool.phase == Phase.BACKWARD
    latest_first = stage.shape[0] - 1 - pool.instruction_stage
    priority = (is_backward * len(stage) + latest_first) * micro_batches + pool.micro_batch
    return arrange(pool, pool.chunk + is_backward * chunks, priority, limit=2 * devices)


def _enough_for_both_ways(devices: int, micro_batches: int, chunks: int) -> None:
    """Raise `LayoutError` unless micro-batches are even and at least as many as devices."""
    even_pipelines(devices, micro_batches, chunks)
    if micro_batches % 2 or micro_batches < devices:
        raise LayoutError(
            f"schedule dualpipe on {devices} devices needs an even number of at least {devices} micro-batches, "
            f"got {micro_batches}"
        )


@register(
    "dualpipe", stage_map=bidirectional_stages, chunks=2, plain=False, demands=_enough_for_both_ways
)
def dualpipe(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Two directions over p devices; device d holds stages d and p - 1 - d, half the micro-batches
    go each way."""
    # Seen from its end of the pipeline, a device runs the passes of DualPipe-V on p / 2 devices
    # with half of the micro-batches.
    v_devices, v_micro_batches = devices // 2, micro_batches // 2
    orders = []
    for device in range(devices):
        v_device = min(device, devices - 1 - device)
        v_order = _v_order(v_devices, max(v_micro_batches, 2 * v_devices), v_device)

        # Its first chunk takes the micro-batches that enter at that end: even ones go down, odd
        # ones up.
        mirrored = device >= v_devices
        order = []
        for work in _struck_out(v_order, v_micro_batches):
            chunk = work.chunk ^ mirrored
            order.append(work._replace(chunk=chunk, micro_batch=2 * work.micro_batch + chunk))
        orders.append(order)
    return from_orders("dualpipe", bidirectional_stages(devices, chunks), micro_batches, orders)


@register("dualpipe-v", stage_map=v_stages, chunks=2, plain=False)
def dualpipe_v(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """DualPipe cut in half: one direction over a V of 2 p stages; with fewer than 2 p
    micro-batches, the missing ones are removed from the order."""
    orders = []
    for device in range(devices):
        full_order = _v_order(devices, max(micro_batches, 2 * devices), device)
        orders.append(_struck_out(full_order, micro_batches))
    return from_orders("dualpipe-v", v_stages(devices, chunks), micro_batches, orders)


def _struck_out(order: list[Work], micro_batches: int) -> list[Work]:
    """The order without missing micro-batches; passes paired with one of them run alone."""
    possible = []
    for work, after in zip(order, [*order[1:], None], strict=True):
        if work.micro_batch < micro_batches:
            alone = after is None or after.micro_batch >= micro_batches
            possible.append(work._replace(paired=work.paired and not alone))
    return possible


class _Passes:
    """The passes of one device of DualPipe, in the order in which it runs them."""

    def __init__(self, micro_batches: int) -> None:
        self.order: list[Work] = []
        # Micro-batches still to come, by chunk.
        self._forwards = iter(range(micro_batches)), iter(range(micro_batches))
        self._backwards = iter(range(micro_batches)), iter(range(micro_batches))
        self.put_off: list[Work] = []
        """Weight gradients that were split off and not yet run."""

    def forward(self, chunk: int, paired: bool = False) -> None:
        """Run the next forward of a chunk."""
        micro_batch = next(self._forwards[chunk])
        self.order.append(Work(Phase.FORWARD, chunk, micro_batch, paired=paired))

    def backward(self, chunk: int, split: bool = False) -> None:
        """Run the next backward of a chunk; if it is split, its weight gradients are put off."""
        micro_batch = next(self._backwards[chunk])
        phase = Phase.BACKWARD_INPUT if split else Phase.BACKWARD
        self.order.append(Work(phase, chunk, micro_batch))
        if split:
            self.put_off.append(Work(Phase.BACKWARD_WEIGHT, chunk, micro_batch))

    def pair(self, forward_chunk: int) -> None:
        """Run a forward of one chunk beside a backward of the other."""
        self.forward(forward_chunk, paired=True)
        self.backward(1 - forward_chunk)

    def weight(self) -> None:
        """Run the oldest of the deferred weight gradients."""
        self.order.append(self.put_off.pop(0))


def _v_order(devices: int, micro_batches: int, device: int) -> list[Work]:
    """A device's passes in the eight phases of DualPipe, for at least 2 p micro-batches.

    In the steady phase a forward of one chunk and a backward of the other run as a pair. Input
    gradients are split from weight gradients only where these fill a bubble.
    """
    later = devices - 1 - device
    run = _Passes(micro_batches)

    # 1. Warm-up: forwards of the first chunk, while the first micro-batch is on its way down the V
    # and back.
    for _ in range(2 * later):
        run.forward(0)

    # 2. Forwards of both chunks in turn, until the first backward arrives.
    for _ in range(device + 1):
        run.forward(0)
        run.forward(1)

    # 3. The first backwards, of the second chunk, each with its weight gradient at once.
    for _ in range(later):
        run.backward(1, split=True)
        run.weight()
        run.forward(1)

    # 4. Steady phase: a forward of either chunk beside a backward of the other.
    for _ in range(micro_batches - 2 * devices + device + 1):
        run.pair(0)
        run.pair(1)

    # 5. No micro-batch is left to enter: pairs of a forward of the second chunk alone.
    for _ in range(later):
        run.backward(1)
        run.pair(1)

    # 6. Backwards of both chunks in turn. Weight gradients of the later half are put off.
    for chunk, split in _last_backwards(device + 1):
        run.backward(chunk, split)

    # 7. These fill the gaps between the last backwards of the first chunk.
    for _ in range(later):
        run.weight()
        run.backward(0, split=True)

    # 8. Weight gradients that are left.
    while run.put_off:
        run.weight()
    return run.order


def _last_backwards(pairs: int) -> Iterator[tuple[int, bool]]:
    """Chunks of the last backwards in turn; those of the second half are split, so that their
    weight gradients run later."""
    for i in range(2 * pairs):
        yield (i + 1) % 2, i >= pairs
