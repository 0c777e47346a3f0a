"""Memory of a layout as a pure JAX function of the parameters that its step time depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.prediction._compose import LayoutBatch
from perfmodel.prediction._memory import rank_memory
from perfmodel.prediction._memory_inputs import BlockBytes, RankBlocks, Sharding
from perfmodel.prediction._problem import Setting, StepProblem
from perfmodel.prediction._programs import program_live
from perfmodel.prediction.differentiable._prices import StepParameters
from perfmodel.prediction.differentiable._program import Cuts, along
from perfmodel.schedule.memory import LiveState


@dataclass(frozen=True, eq=False)
class _MemoryTerms:
    """Terms of memory at one micro-batch size, under one element type."""

    setting: Setting
    blocks: BlockBytes
    sharding: Sharding
    live: tuple[LiveState, ...]
    """Live memory with all saved activations on the device; where the layout offloads them, also
    with only those that cannot wait on the host."""

    def bytes(self, cuts: Cuts, x: StepParameters) -> Float[Array, " ranks"]:
        """Peak bytes of each rank at given parameters."""
        counts, full = (
            blocks.sum(axis=1) for blocks in cuts.counts_and_recomputed(x.layers, x.recompute)
        )
        totals = []
        for live in self.live:
            ranks = RankBlocks.of(counts, full, live)
            totals.append(rank_memory(ranks, self.blocks, self.sharding, self.setting).total[0])
        on_device, offloaded = totals[0], totals[-1]
        return on_device + x.offload * (offloaded - on_device)


@dataclass(frozen=True, eq=False)
class Memory:
    """Peak bytes of every pipeline rank, interpolated between whole micro-batches and element
    types."""

    cuts: Cuts
    """The model, cut between layers."""
    sizes: Float[np.ndarray, " sizes"]
    """Micro-batch sizes that memory is given for."""
    of_types: tuple[tuple[_MemoryTerms, ...], ...]
    """Terms by element type and micro-batch size."""

    @classmethod
    def of(
        cls,
        problems: Sequence[StepProblem],
        steps: Sequence[Sequence[LayoutBatch]],
        cuts: Cuts,
        sizes: Sequence[int],
    ) -> "Memory":
        """Collect the terms of a layout; `problems` and `steps` are the fields of `composed`."""
        terms_of_types = []
        for i, problem in enumerate(problems):
            setting = problem.setting
            terms_of_sizes = []
            for batches in steps:
                batch = batches[i]
                sharding = Sharding.of(batch.layouts, setting.job)
                terms_of_sizes.append(
                    _MemoryTerms(setting, batch.bytes, sharding, _live(setting, batch))
                )
            terms_of_types.append(tuple(terms_of_sizes))
        return cls(cuts, np.array(sizes, float), tuple(terms_of_types))

    def bytes(self, x: StepParameters) -> Float[Array, " ranks"]:
        """Peak bytes of each rank at given parameters."""
        terms_of_types = []
        for terms_of_sizes in self.of_types:
            by_size = jnp.stack([terms.bytes(self.cuts, x) for terms in terms_of_sizes])
            terms_of_types.append(along(by_size, jnp.asarray(x.micro_batch), self.sizes))
        in_16_bits, in_8_bits = terms_of_types[0], terms_of_types[-1]
        return in_16_bits + x.fp8 * (in_8_bits - in_16_bits)


def _live(setting: Setting, layout_batch: LayoutBatch) -> tuple[LiveState, ...]:
    """Live memory of a program without offloading; of a layout that offloads, also with it."""
    offloads = (False, True) if layout_batch.spec.offload else (False,)
    return tuple(
        program_live(setting, replace(layout_batch.spec, offload=offload)) for offload in offloads
    )


@partial(jax.jit, static_argnums=0)
def memory_bytes(memory: Memory, x: StepParameters) -> Float[Array, " ranks"]:
    """Peak bytes of each rank at given parameters, compiled once per layout."""
    return memory.bytes(x)
