"""The specification of a program: schedule and communication."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final, Literal, get_args

import numpy as np
from jaxtyping import Int

from perfmodel.errors import LayoutError
from perfmodel.schedule import Schedule, Scheduler, forward_part, get_schedule

# The fields of `ProgramSpec` explain the values.
Sends = Literal["lag", "op", "blocking"]
GradReduce = Literal["none", "end", "overlap", "eager_opt"]
ParamGather = Literal["none", "step", "step_overlap", "layer", "layer_serial"]


_CHOICES: Final = {
    "sends": get_args(Sends),
    "grad_reduce": get_args(GradReduce),
    "param_gather": get_args(ParamGather),
}


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """The input of `build`, without anything that only affects durations.

    Raises:
        LayoutError: a value that is out of range or contradicts another, with the remedy.
    """

    schedule: str = "1f1b"
    """Name of a registered pipeline schedule."""
    stages: int
    """Pipeline stages, one device each (not counted by chunk)."""
    micro_batches: int
    chunks: int = 1
    """Model chunks (virtual stages) per device; 1 means the schedule's default."""
    steps: int = 1
    """Steps one after another in one structure, without a flush between them: each device updates
    its weights and continues. Asynchronous schedules always run like this."""
    offload: bool = False
    """Whether activations are kept in host memory until their backward."""
    forward_only: bool = False
    """Whether the program is inference: only the schedule's forward passes, without reductions or
    optimizer."""
    sends: Sends = "lag"
    """Transfers between stages: `lag` delays the receiver only (links do not queue), `op` occupies
    the sender's SEND stream, `blocking` the sender's COMPUTE stream."""
    grad_reduce: GradReduce = "none"
    """When gradients are reduced, on DATA_COMM. `end`: whole chunks after the device's last
    backward. `overlap`: each segment as soon as its last backward is done (Chimera's eager).
    `eager_opt`: eagerly only for stages whose device is idle between their last backward and its
    own last pass, for the others at the end (Chimera, section 3.2)."""
    reduce_every_micro_batch: bool = False
    """Gradients are reduced after every backward, not only the last (ZeRO 2 and 3). With
    `grad_reduce="end"` the device's next pass waits for each such reduction, and under ZeRO 2 the
    last of every chunk comes after the device's last backward."""
    param_gather: ParamGather = "none"
    """`step` (ZeRO 1 and 2): after the optimizer, chunk by chunk. `step_overlap`: at the start of
    the step on DATA_COMM; the first forward of each segment waits for its own. `layer` (ZeRO 3):
    before each segment's forward and backward, `prefetch` segments ahead; `layer_serial`: not
    ahead."""
    prefetch: int = 1
    """Segments that `param_gather="layer"` gathers ahead of the one being computed."""
    segments: int = 1
    """Layer groups per chunk. Passes are split into one op per segment only where communication is
    by segment: everywhere under `layer`, otherwise in the first forward (`step_overlap`) and last
    backward (`overlap`) of each chunk."""
    combines_passes: bool = False
    """Whether each backward of a device is combined with the next forward, of another micro-batch,
    whose kernels hide the exchanges of experts (Megatron-Core
    core/pipeline_parallel/combined_1f1b.py); schedules that pair passes themselves combine only
    those pairs."""
    tied_embedding: bool = False
    """Whether gradients of tied embeddings are all-reduced between first and last stage."""
    optimizer: bool = True
    """Whether the step ends with an update of the weights."""
    grad_norm_barrier: bool = True
    """Whether every device's optimizer waits for all devices, because of the global gradient
    norm."""
    digest: str | None = field(default="", init=False)
    """`Scheduler.digest`: distinguishes specs whose schedules share a name."""
    scheduler: Scheduler = field(init=False, repr=False, compare=False)
    """The scheduler of this name at the time when the spec was made."""

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches", "chunks", "steps", "segments", "prefetch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                remedy = ""
                if name == "prefetch":
                    remedy = "; for gathers without prefetch use param_gather='layer_serial'"
                raise LayoutError(
                    f"program: {name} must be a whole number of at least 1, got {value!r}{remedy}"
                )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise LayoutError(
                    f"program: {name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )

        # Looked up once: a later `register` or an edited file must not change the meaning of a
        # spec.
        object.__setattr__(self, "scheduler", get_schedule(self.schedule))
        object.__setattr__(self, "chunks", self.scheduler.chunks_for(self.chunks))
        object.__setattr__(self, "digest", self.scheduler.digest)
        if self.reduce_every_micro_batch and self.grad_reduce == "none":
            raise LayoutError(
                "program: reduce_every_micro_batch needs gradients to reduce; set grad_reduce to 'overlap' or 'end'"
            )
        if self.is_forward_only:
            self._check_forward_only()

    def _check_forward_only(self) -> None:
        """Raise `LayoutError` for communication that inference does not need."""
        if self.grad_reduce != "none":
            raise LayoutError(
                f"program: a forward-only program has no gradients; set grad_reduce='none', not {self.grad_reduce!r}"
            )
        if self.param_gather in ("step", "step_overlap"):
            raise LayoutError(
                "program: a forward-only program has no optimizer step, after which weights are gathered; use "
                f"param_gather='none' or 'layer', not {self.param_gather!r}"
            )

    @cached_property
    def stage_map(self) -> Int[np.ndarray, "stages chunks"]:
        """Global stage of every chunk of every device."""
        return self.scheduler.stage_map(self.stages, self.chunks)

    @cached_property
    def n_stages(self) -> int:
        """Global stages that a micro-batch passes."""
        return int(self.stage_map.max()) + 1

    @cached_property
    def replicas(self) -> int:
        """Copies of every stage's weights over the pipeline's devices."""
        return self.stage_map.size // self.n_stages

    @property
    def is_forward_only(self) -> bool:
        """Whether the step has no backward passes, by flag or by schedule."""
        return self.forward_only or self.schedule == "forward"

    @property
    def ends_with_reductions(self) -> bool:
        """Whether reductions come after a device's last backward pass (no overlap, up to ZeRO 2).

        ZeRO 2 has reduced the other micro-batches' gradients before. ZeRO 1 and 2 are alike in the
        last ones, so that both treat bubbles in the same way.
        """
        # In a stream of steps a device has no end of the step to wait for.
        late = self.grad_reduce in ("end", "eager_opt") and not (
            self.steps > 1 or self.scheduler.asynchronous
        )
        return late and not (self.reduce_every_micro_batch and self.gathers_by_layer)

    @property
    def gathers_by_layer(self) -> bool:
        """Whether weights are gathered before every use (ZeRO 3)."""
        return self.param_gather in ("layer", "layer_serial")

    @property
    def gathers_ahead(self) -> int:
        """Segments that weight gathers run ahead of compute."""
        return self.prefetch if self.param_gather == "layer" else 0

    def build_schedule(self) -> Schedule:
        """The pipeline schedule that the spec names."""
        schedule = self.scheduler(self.stages, self.micro_batches, self.chunks, self.steps)
        return forward_part(schedule) if self.forward_only else schedule

    def key(self) -> str:
        """A stable string key of the spec, for the disk cache."""
        compared = [field.name for field in fields(self) if field.compare]
        return ";".join(f"{name}={getattr(self, name)}" for name in compared)
