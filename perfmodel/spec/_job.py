"""Jobs: what one step computes, independent of the layout; and optimizers, with their states per
parameter and the traffic of their update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from perfmodel.errors import LayoutError, Reason, UnknownNameError
from perfmodel.spec._cluster import USUAL_DTYPES, Device
from perfmodel.spec._conv_net import ConvNet
from perfmodel.spec._job_sections import FineTuning, Implementation
from perfmodel.spec._layout import Layout
from perfmodel.spec._model import Model, Transformer
from perfmodel.spec._sections import flat_keywords, require_switches, section
from perfmodel.spec.encoders import encoders_of
from perfmodel.spec.unet import UNet
from perfmodel.units import LONGEST_SEQUENCE, dtype_bytes, dtype_name, require_whole

if TYPE_CHECKING:
    from perfmodel.spec.keywords import JobKeywords

BLOCK_OF_8_BIT: Final = 256
"""Elements that share a scale in 8-bit states (Dettmers et al., arXiv 2110.02861; bitsandbytes
since 0.44)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """States and arithmetic of an optimizer, besides weights, gradients and fp32 master weights."""

    state_bytes: float
    """Bytes of optimizer states per parameter."""
    other_state_bytes: float | None = None
    """Bytes of states per parameter of embeddings and head, if another optimizer updates them;
    None: the same."""
    master: bool = True
    """Keeps an fp32 copy of weights that are narrower."""
    gradient_reads: int = 1
    """Passes over the gradient."""
    further_bytes: float = 0.0
    """Bytes that an update moves per parameter beyond gradient, weight and states."""
    clips: bool = True
    """Gradients are clipped before the update: read for their norm, then rescaled (fp16 gradients
    are also divided by the loss scale)."""
    newton_schulz: int = 0
    """Iterations that orthogonalise the update of every matrix of the layers."""
    kernel: str = "adam"
    """Measured kernel whose time per byte prices the update."""
    source: str


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "adam": Optimizer(state_bytes=8, source="Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "adamw": Optimizer(
        state_bytes=8, source="Loshchilov and Hutter, arXiv 1711.05101, algorithm 2"
    ),
    "adam8bit": Optimizer(
        state_bytes=2 * (1 + 4 / BLOCK_OF_8_BIT),
        source="Dettmers et al., arXiv 2110.02861, section 2",
    ),
    "adam16bit": Optimizer(
        state_bytes=4,
        master=False,
        source="torch/optim/adamw.py of weights that are kept in 16 bits alone: moments in the weights' type "
        "(`torch.zeros_like`)",
    ),
    "adafactor": Optimizer(
        state_bytes=0,
        gradient_reads=3,
        clips=False,
        source="Shazeer and Stern, arXiv 1804.04235, algorithm 4: without momentum. Its sums of rows and columns take "
        "less than a thousandth of the weights and are left out. One pass computes these sums, one the norm of the "
        "update, and one applies it",
    ),
    "lion": Optimizer(state_bytes=4, source="Chen et al., arXiv 2302.06675, algorithm 2"),
    "lamb": Optimizer(
        state_bytes=8,
        further_bytes=20,
        source="You et al., arXiv 1904.00962, algorithm 2, by apex csrc/multi_tensor_lamb.cu: Adam's update overwrites "
        "the gradient, is read for its norm, and is read again to be applied; weights are read once more for the "
        "update and for their norm",
    ),
    "muon": Optimizer(
        state_bytes=4,
        other_state_bytes=8,
        newton_schulz=5,
        source="Jordan et al. 2024, Muon; Liu et al., arXiv 2502.16982, algorithm 1: AdamW outside matrices",
    ),
    "sgd": Optimizer(
        state_bytes=4,
        clips=False,
        kernel="sgd",
        source="with momentum: Qian 1999, equation 2",
    ),
    "plain-sgd": Optimizer(
        state_bytes=0,
        master=False,
        clips=False,
        kernel="sgd",
        source="Robbins and Monro 1951: w - lr * gradient",
    ),
}
"""Optimizers by name; `sgd` keeps a momentum, `plain-sgd` nothing. It and `adam16bit` update
weights in their own type."""


@flat_keywords
@dataclass(frozen=True, kw_only=True)
class Job(Implementation):
    """The work of one training or inference step, independent of the layout."""

    global_batch: int
    """Sequences (or images) per optimizer step."""
    seq_len: int
    """Tokens per sequence; the model's length by default."""
    mean_tokens: float | None = None
    """Mean number of computed tokens per sequence, if padding is removed or sequences are batched
    by length. None: `seq_len`."""
    rms_tokens: float | None = None
    """Root mean square of the lengths that attention sees: those of sequences, or, if documents are
    packed into a sequence, the root of the sum of the squares of their lengths. It determines the
    time of attention; `mean_tokens` determines the rest. None: a power-law density of lengths up to
    `seq_len` with that mean (`Job.attended_tokens`)."""
    input_samples_per_s: float | None = None
    """Sequences or images per second from the input pipelines of all devices together. They run
    ahead of the steps, so a step takes as long as the slower of both. None: no limit."""
    generation_s: float = 0.0
    """Seconds of every step in which the devices generate the samples that it is then trained on,
    and score them, as in reinforcement learning on the trained devices. Other devices that generate
    meanwhile are an input pipeline (`input_samples_per_s`)."""
    dtype: str = "bf16"
    """Element type of matrix products; by default the first of bf16, fp16 and fp32 that the device
    supports."""
    mode: Literal["train", "inference"] = "train"
    """`train`: forward, backward and update; `inference`: forward only."""
    cached_tokens: int = 0
    """Earlier tokens of each sequence whose keys and values are attended to: from a cache in
    inference (with `seq_len` 1 the step generates one token per sequence), or from earlier slices
    of a sequence."""
    optimizer: str = "adam"
    """Optimizer: adam, adamw, adam8bit, adam16bit, adafactor, lamb, lion, muon, sgd (with momentum)
    or plain-sgd."""
    weight_average: bool = False
    """Keep an exponential moving average of the weights in fp32, updated after every step."""
    fine_tuning: FineTuning = field(default=FineTuning(), metadata=section())
    """Frozen weights and adapters."""
    assumed: tuple[str, ...] = ()
    """Assumptions about settings that were not stated, one sentence each."""

    if TYPE_CHECKING:
        # Editors and type checkers complete the keys of sections too (`flat_keywords`).
        def __init__(
            self,
            *,
            global_batch: int,
            seq_len: int,
            dtype: str = "bf16",
            assumed: tuple[str, ...] = (),
            **of_sections: Unpack[JobKeywords],
        ) -> None: ...

    @classmethod
    def of(
        cls,
        model: Model,
        device: Device,
        *,
        global_batch: int,
        seq_len: int | None = None,
        dtype: str | None = None,
        **fields: Any,
    ) -> "Job":
        """Make the job of a model on a device; sequence length and element type have defaults.

        The defaults are the model's own length, and the first of bf16, fp16 and fp32 that the
        device supports; `assumed` lists defaults that are not obvious.
        """
        # Values that are not obvious are named, so that a prediction can say what it rests on.
        assumed = []
        if seq_len is None:
            seq_len = model.seq_len
            longest = model.inputs.longest_seq_len if isinstance(model, Transformer) else 0
            if longest:
                assumed.append(
                    f"seq_len={seq_len:,} is assumed, because {model.name} states only a maximum of {longest:,}; "
                    "set another with --seq-len (seq_len)"
                )
        if dtype is None:
            dtype = device.usual_dtype
            if dtype != USUAL_DTYPES[0]:
                assumed.append(
                    f"dtype {dtype} is assumed: device {device.name} has no {USUAL_DTYPES[0]}"
                )
        return cls(
            global_batch=global_batch,
            seq_len=seq_len,
            dtype=dtype,
            assumed=tuple(assumed),
            **fields,
        )

    def __post_init__(self) -> None:
        # Sections have checked their other fields by themselves.
        require_switches("job", self)
        if isinstance(self.dtype, str) and dtype_name(self.dtype) != self.dtype:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        require_whole("job", {"global_batch": self.global_batch})
        require_whole("job", {"seq_len": self.seq_len}, most=LONGEST_SEQUENCE)
        require_whole("job", {"cached_tokens": self.cached_tokens}, least=0)
        if self.optimizer not in OPTIMIZERS:
            raise UnknownNameError("optimizer", str(self.optimizer), OPTIMIZERS)

        # Lengths of at most `seq_len` tokens have bounded moments.
        mean, rms = self.mean_tokens, self.rms_tokens
        if mean is not None and not 0 < mean <= self.seq_len:
            raise LayoutError(
                f"job: mean_tokens must be above 0 and at most seq_len={self.seq_len}; got {mean!r}"
            )
        largest = sqrt(self.tokens_per_sequence * self.seq_len)
        if rms is not None and not 0 < rms <= largest * (1 + 1e-9):
            raise LayoutError(
                f"job: rms_tokens must be above 0 and at most {largest:.6g}, which is reached if all lengths are "
                f"0 or seq_len={self.seq_len}; got {rms!r}"
            )
        if self.varied_lengths and self.cached_tokens:
            raise LayoutError(
                "job: cached_tokens cannot be combined with sequences of varied lengths; leave mean_tokens out"
            )

        rate = self.input_samples_per_s
        if rate is not None and not 0 < rate < inf:
            raise LayoutError(f"job: input_samples_per_s must be a number above 0, got {rate!r}")
        if not 0 <= self.generation_s < inf:
            raise LayoutError(
                f"job: generation_s must be a number of seconds, 0 or more; got {self.generation_s!r}"
            )

        # Then checks across several sections.
        is_narrow = self.dtype in ("fp8", "fp4")
        if self.narrow.fp8_attention and not (is_narrow and self.kernels.flash_attention):
            raise LayoutError(
                "job: fp8_attention needs fused attention and 8- or 4-bit products; set dtype=fp8, or leave it out"
            )
        base_weights, frozen = self.fine_tuning.base_weights, self.fine_tuning.frozen
        if base_weights and not (frozen and dtype_bytes(self.dtype) >= 2):
            raise LayoutError(
                f"job: base_weights={base_weights} needs frozen weights and a 16-bit or wider dtype; set both, or "
                "leave it out"
            )

    @property
    def input_s(self) -> float:
        """Seconds that the input pipeline needs for the samples of a step; 0 if it is never the
        limit."""
        if self.input_samples_per_s is None:
            return 0.0
        return self.global_batch / self.input_samples_per_s

    def paced_s(self, trained_s: float) -> float:
        """Seconds of a step that trains for `trained_s`, with its waits for samples.

        Input pipelines run ahead, so the slower of both sets the pace; samples that the devices
        generate themselves come before.
        """
        return max(trained_s, self.input_s) + self.generation_s

    @property
    def varied_lengths(self) -> bool:
        """Whether sequences are shorter than `seq_len`, or made of several documents."""
        return self.mean_tokens is not None or self.rms_tokens is not None

    @property
    def tokens_per_sequence(self) -> float:
        """Mean number of computed tokens per sequence."""
        return self.seq_len if self.mean_tokens is None else self.mean_tokens

    @property
    def attended_tokens(self) -> float:
        """Equivalent sequence length for attention: the mean square of the lengths divided by their
        mean.

        Lengths x up to L of density x^(a-1) have the mean u L with u = a / (a + 1), and the mean
        square L^2 a / (a + 2) = L^2 u / (2 - u): evenly spread ones at u = 1/2, all of length L at
        u = 1.
        """
        # Attention between all tokens of a sequence costs the square of its length.
        if self.rms_tokens is not None:
            return self.rms_tokens**2 / self.tokens_per_sequence
        if self.mean_tokens is None:
            return self.seq_len

        # Of the mean alone: the mean square of the docstring over the mean, L / (2 - u).
        return self.seq_len / (2 - self.mean_tokens / self.seq_len)

    @property
    def adds_half_gradients(self) -> bool:
        """Whether 16-bit gradients are accumulated into separate wider ones."""
        gradients = self.gradients
        return gradients.half_gradients and dtype_bytes(gradients.grad_dtype) > 2 >= dtype_bytes(
            self.dtype
        )

    def num_microbatches(self, layout: Layout) -> int:
        """Micro-batches per replica and step; raises `LayoutError` if the batch does not divide."""
        per_step = layout.micro_batch * layout.dp
        if self.global_batch % per_step:
            raise LayoutError(
                f"global batch {self.global_batch} is not divisible by dp*micro_batch = "
                f"{layout.dp}*{layout.micro_batch}; the nearest multiple is "
                f"{max(1, round(self.global_batch / per_step)) * per_step}",
                Reason.BATCH,
            )
        return self.global_batch // per_step


_OF_SOME_TRANSFORMERS: Final[Mapping[str, Callable[[Transformer], bool]]] = {
    "repeated_keys": lambda model: model.kv_heads < model.heads,
    "split_positions": lambda model: model.inputs.positions == "learned",
    "masked_head": lambda model: model.head.pooler_and_mlm_head,
    "weighted_experts": lambda model: model.experts is not None,
    "expert_dispatcher": lambda model: model.experts is not None,
    "rope": lambda model: model.inputs.positions == "rope",
    "gelu_formula": lambda model: model.block.activation == "gelu",
    "clamp": lambda model: model.block.clamped_glu,
}
"""Fields of `Job` and kinds of `EagerKernel` that matter only for some transformers, with a test
for these."""


_OF_CONVOLUTIONS: Final[dict[str, tuple[type, ...]]] = {
    "fused_batch_norm": (ConvNet,),
    "channels_last": (ConvNet, UNet),
}
"""Fields of `Job` that matter only for convolutional networks, with the kinds of these."""


_OF_ENCODERS: Final = {"cached_latents": False, "cached_text": True}
"""Fields of `Job` that matter only for models with frozen encoders, and whether these encode
text."""


def concerns(name: str, model: Model) -> bool:
    """Whether a field of a job, or a kernel, matters for a model."""
    if name in _OF_ENCODERS:
        return any(encoder.is_of_text == _OF_ENCODERS[name] for encoder in encoders_of(model))
    if name in _OF_CONVOLUTIONS:
        return isinstance(model, _OF_CONVOLUTIONS[name])

    # Fields that are not listed apply to all models.
    means_something = _OF_SOME_TRANSFORMERS.get(name)
    if means_something is None:
        return True
    return isinstance(model, Transformer) and means_something(model)
