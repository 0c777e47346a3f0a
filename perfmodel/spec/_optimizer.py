"""Optimizers: what each keeps of a parameter and what its update passes over. An optimizer is one entry."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

BLOCK_OF_8_BIT: Final = 256
"""Elements that share a scale in 8-bit states (Dettmers et al., arXiv 2110.02861; bitsandbytes since 0.44)."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and does, beside weights, gradients and a master copy of weights in fp32."""

    state_bytes: float
    """Per parameter: moments."""
    other_state_bytes: float | None = None
    """The same outside layers' matrices, where another optimizer updates embeddings and head; None: the same."""
    master: bool = True
    """Keeps an fp32 copy of weights that are narrower."""
    gradient_reads: int = 1
    """Passes over the gradient."""
    clips: bool = True
    """Gradients are read for their norm and rescaled before (and 16-bit floats rid of the loss scale)."""
    newton_schulz: int = 0
    """Iterations that orthogonalise the update of every matrix of the layers."""
    kernel: str = "adam"
    """Measured kernel that it is priced like, by the bytes that it moves."""
    source: str


OPTIMIZERS: Final[Mapping[str, Optimizer]] = {
    "adam": Optimizer(state_bytes=8, source="Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "adamw": Optimizer(state_bytes=8, source="Loshchilov and Hutter, arXiv 1711.05101, algorithm 2"),
    "adam8bit": Optimizer(
        state_bytes=2 * (1 + 4 / BLOCK_OF_8_BIT), source="Dettmers et al., arXiv 2110.02861, section 2"
    ),
    "adam16bit": Optimizer(
        state_bytes=4, master=False,
        source="torch/optim/adamw.py of weights that are kept in 16 bits alone: moments in the weights' type "
        "(`torch.zeros_like`)",
    ),
    "adafactor": Optimizer(
        state_bytes=0, gradient_reads=3, clips=False,
        source="Shazeer and Stern, arXiv 1804.04235, algorithm 4: without momentum; sums of rows and columns, below a "
        "thousandth of the weights, left out; one pass for these, one for the update's norm, one to apply it",
    ),
    "lion": Optimizer(state_bytes=4, source="Chen et al., arXiv 2302.06675, algorithm 2"),
    "muon": Optimizer(
        state_bytes=4, other_state_bytes=8, newton_schulz=5,
        source="Jordan et al. 2024, Muon; Liu et al., arXiv 2502.16982, algorithm 1: AdamW outside matrices",
    ),
    "sgd": Optimizer(state_bytes=4, clips=False, kernel="sgd", source="with momentum: Qian 1999, equation 2"),
    "plain-sgd": Optimizer(
        state_bytes=0, master=False, clips=False, kernel="sgd", source="Robbins and Monro 1951: w - lr * gradient"
    ),
}  # fmt: skip
"""By name; `sgd` keeps a momentum, `plain-sgd` nothing. It and `adam16bit` update weights in their own type."""
