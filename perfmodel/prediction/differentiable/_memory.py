"""Memory of pipeline ranks as a function of the same parameters as the step time: `rank_memory`, traced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.prediction._compose import Bundle
from perfmodel.prediction._memory import BlockBytes, RankBlocks, Sharding, rank_memory
from perfmodel.prediction._pipeline import LiveState
from perfmodel.prediction._problem import Setting, StepProblem
from perfmodel.prediction._programs import program_live
from perfmodel.prediction.differentiable._division import Cuts, along
from perfmodel.prediction.differentiable._parameters import StepParameters


@dataclass(frozen=True, eq=False)
class _Kept:
    """What memory follows from at one micro-batch size, under one element type."""

    setting: Setting
    blocks: BlockBytes
    sharding: Sharding
    live: tuple[LiveState, ...]
    """With all saved activations on the device; and, where the layout offloads them, with none that can wait."""

    def bytes(self, cuts: Cuts, x: StepParameters) -> Float[Array, " ranks"]:
        counts, full = (held.sum(axis=1) for held in cuts.held(x.layers, x.recompute))
        found = [rank_memory(RankBlocks.of(counts, full, live), self.blocks, self.sharding, self.setting).total[0]
                 for live in self.live]  # fmt: skip
        return found[0] + x.offload * (found[-1] - found[0])


@dataclass(frozen=True, eq=False)
class Memory:
    """Peak bytes of every pipeline rank. What is in between whole micro-batches and element types is interpolated."""

    cuts: Cuts
    sizes: Float[np.ndarray, " sizes"]
    of_types: tuple[tuple[_Kept, ...], ...]
    """By element type and micro-batch size."""

    @classmethod
    def of(
        cls, problems: Sequence[StepProblem], steps: Sequence[Sequence[Bundle]], cuts: Cuts, sizes: Sequence[int]
    ) -> "Memory":
        """Of a layout; arguments are those of `composed`."""
        of_types = []
        for problem, of_sizes in zip(problems, zip(*steps, strict=True), strict=True):
            setting = problem.setting
            of_types.append(
                tuple(_Kept(setting, one.bytes, Sharding.of(one.layouts), _live(setting, one)) for one in of_sizes)
            )
        return cls(cuts, np.array(sizes, float), tuple(of_types))

    def bytes(self, x: StepParameters) -> Float[Array, " ranks"]:
        """At some parameters."""
        by_size = [jnp.stack([one.bytes(self.cuts, x) for one in of_sizes]) for of_sizes in self.of_types]
        own = [along(of_type, jnp.asarray(x.micro_batch), self.sizes) for of_type in by_size]
        return own[0] + x.fp8 * (own[-1] - own[0])


def _live(setting: Setting, bundle: Bundle) -> tuple[LiveState, ...]:
    offloads = (False, True) if bundle.spec.offload else (False,)
    return tuple(program_live(setting, replace(bundle.spec, offload=offload)) for offload in offloads)
