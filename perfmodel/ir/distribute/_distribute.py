"""The D/T/P transform: data, tensor and pipeline parallelism with micro-batches, ZeRO and
checkpointing at once."""

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel.errors import LayoutError
from perfmodel.ir import STREAMS, Program, Stream
from perfmodel.ir.distribute._checkpoint import checkpoint
from perfmodel.ir.distribute._parallel import data_parallel, expert_parallel, tensor_parallel
from perfmodel.ir.distribute._pipeline import micro_batches, pipeline
from perfmodel.ir.distribute._sequence import sequence_slices
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout

# Degrees that a `Layout` has too go by the layout's names.
_FIELDS: Final = {
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "ep": "expert",
    "micro_batches": "micro_batches",
    "steps": "steps",
    "schedule": "schedule",
    "vpp": "chunks",
    "zero": "zero",
    "sequence_parallel": "sequence_parallel",
    "checkpoint": "checkpoint",
    "send_stream": "send_stream",
}
"""Field of `Degrees` by its name in layouts."""
_WORDS: Final = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of distribution along each dimension.

    Raises:
        LayoutError: a degree below one.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Ranks that divide the experts among them; together with the `data` replicas they also divide
    the batch."""
    micro_batches: int = 1
    schedule: str = "1f1b"
    """Name of a registered pipeline schedule."""
    steps: int = 1
    """Steps that an asynchronous schedule runs without a flush between them; the batch covers all
    of them."""
    chunks: int = 1
    """Model chunks per pipeline device (interleaved schedules)."""
    zero: int = 0
    sequence_parallel: bool = False
    checkpoint: bool = False
    """Recompute each layer's inner activations in the backward pass."""
    send_stream: Stream = "compute"

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "expert", "micro_batches", "steps", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{name} must be a whole number of at least 1, got {value!r}")

    @classmethod
    def of(cls, layout: Layout, global_batch: int) -> "Degrees":
        """Convert a layout to degrees for a program of `global_batch` samples.

        Fused attention recomputes its core in any case, so that selective recomputation is none.

        Raises:
            LayoutError: context parallelism, offloading or experts sharded otherwise than the rest
                (`etp`), which no transform does, or a batch that does not divide.
        """
        # `spread` gives a device one coordinate per dimension, so experts cannot have a tensor
        # degree of their own.
        if layout.expert_tp != layout.tp:
            raise LayoutError(
                f"layout {layout.label}: programs shard experts over tp={layout.tp} ranks like all other "
                "weights; leave etp out"
            )
        if layout.cp > 1 or layout.offload or layout.offload_layers:
            raise LayoutError(
                f"layout {layout.label}: programs support neither context parallelism nor offloading; use "
                "cp=1 and leave offloading out"
            )
        # A layout gives samples per micro-batch, a program the number of micro-batches.
        micro_batches, remainder = divmod(global_batch, layout.dp * layout.micro_batch)
        if remainder or not micro_batches:
            raise LayoutError(
                f"layout {layout.label}: a batch of {global_batch} is not divisible into its micro-batches; "
                "change either"
            )
        return cls(
            # `Layout.dp` counts the expert ranks, which share the batch; here the two are separate
            # factors.
            data=layout.dp // layout.ep,
            tensor=layout.tp,
            pipeline=layout.pp,
            expert=layout.ep,
            micro_batches=micro_batches,
            schedule=layout.effective_schedule,
            chunks=layout.vpp,
            zero=layout.zero,
            sequence_parallel=layout.effective_sequence_parallel,
            checkpoint=layout.recompute == "full",
        )

    @classmethod
    def parse(cls, text: str) -> "Degrees":
        """Parse degrees from `dp=2,tp=2,pp=2,micro_batches=4,schedule=1f1b`, or from DistIR's
        D/T/P/K as `2/2/2/4`.

        Raises:
            LayoutError: an unknown name, or an invalid value.
        """
        # D/T/P/K is how the paper's table 2 writes configurations.
        if re.fullmatch(r"\d+(/\d+){3}", text.strip()):
            text = ",".join(
                f"{n}={v}"
                for n, v in zip(("dp", "tp", "pp", "micro_batches"), text.split("/"), strict=True)
            )
        values: dict[str, Any] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = word.partition("=")
            field = _FIELDS.get(name)
            if field is None or not value:
                raise LayoutError(
                    f"--layout: {word!r} is not NAME=VALUE; names: {', '.join(_FIELDS)}"
                )
            number_or_text = int(value) if value.isdecimal() else value
            values[field] = _WORDS.get(value.lower(), number_or_text)
            # The default's type is the field's type; `bool` is no `int` here, so that `zero=true`
            # is refused.
            if type(values[field]) is not type(getattr(cls, field)):
                raise LayoutError(
                    f"--layout: {word!r}; write a value such as the default, {name}={str(getattr(cls, field)).lower()}"
                )
        if values.get("send_stream", "send") not in STREAMS:
            raise LayoutError(f"--layout: send_stream is one of {', '.join(STREAMS)}")
        return cls(**values)

    def __str__(self) -> str:
        """Text that `parse` reads: dp, tp, pp and micro_batches always, other degrees only if they
        differ from 1."""
        shown = []
        for name, field in _FIELDS.items():
            value = getattr(self, field)
            if name in ("dp", "tp", "pp", "micro_batches") or value != getattr(Degrees, field):
                shown.append(f"{name}={str(value).lower()}")
        return ",".join(shown)

    @property
    def n_devices(self) -> int:
        """Number of devices: the product of all degrees."""
        return self.data * self.tensor * self.pipeline * self.expert


def distribute(program: Program, degrees: Degrees, *, representative: bool = False) -> Program:
    """A one-device program over `degrees.n_devices` devices.

    Ranks are numbered as Megatron-LM numbers them: tensor ranks next to one another, then expert
    ranks, data ranks, and pipeline stages outermost.

    Args:
        program: program of one device.
        degrees: degree of each parallel dimension.
        representative: write down the first tensor, expert and data rank of each stage only. Such a
            program is simulated like the whole one, whose other ranks do the same at the same time,
            and cannot be executed.

    Raises:
        LayoutError: something does not divide; the message names it.
    """
    return spread_stages(staged(program, degrees), degrees, representative=representative)


def staged(program: Program, degrees: Degrees) -> Program:
    """Divide the program into stages and micro-batches: the first half of `distribute`.

    It depends on P and K alone, so a search shares it among layouts that differ in D and T.

    Raises:
        LayoutError: as `distribute`.
    """
    # Order matters: slices of the sequence first, since recomputation and stages then treat each as
    # a pass; checkpoints before stages, so that copies land on the stage of their layer.
    name = degrees.schedule if program.trains else "forward"
    scheduler = get_schedule(name)
    program = sequence_slices(program, scheduler.slices)
    if degrees.checkpoint:  # of slices all but what later ones see of them
        program = checkpoint(program)
    if degrees.pipeline * degrees.chunks * scheduler.slices == 1:
        return micro_batches(program, degrees.micro_batches)
    if degrees.steps > 1 and not scheduler.asynchronous:
        raise LayoutError(f"schedule {name} is synchronous, so a program has one step; use steps=1")
    schedule = scheduler(degrees.pipeline, degrees.micro_batches, degrees.chunks, degrees.steps)
    return pipeline(program, schedule, send_stream=degrees.send_stream, weights=scheduler.weights)


def spread_stages(program: Program, degrees: Degrees, *, representative: bool = False) -> Program:
    """Spread each stage of a `staged` program over tensor, expert and data ranks.

    Raises:
        LayoutError: as `distribute`.
    """
    # Innermost dimension first: each spread multiplies the devices and its stride skips the
    # dimensions inside it. Tensor ranks, which communicate most, end up next to one another.
    program = tensor_parallel(
        program,
        degrees.tensor,
        sequence_parallel=degrees.sequence_parallel,
        representative=representative,
    )
    program = expert_parallel(
        program, degrees.expert, stride=degrees.tensor, representative=representative
    )
    stride = degrees.tensor * degrees.expert
    return data_parallel(
        program, degrees.data, zero=degrees.zero, stride=stride, representative=representative
    )


def on_one_stream(program: Program) -> Program:
    """The program with every instruction on the compute stream, for ranks that run one instruction
    at a time."""
    alone = tuple(
        i if i.tag.stream == "compute" else replace(i, tag=replace(i.tag, stream="compute"))
        for i in program.function.instructions
    )
    return replace(program, function=replace(program.function, instructions=alone))
