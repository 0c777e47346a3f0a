"""Activations of a stack's first layers on the host: what computing waits for their copies (`Layout.offload_layers`).

Transformer Engine (pytorch/cpu_offload.py, `AsyncDoubleBufferGroupOffloadHandler`, which Megatron-Core calls after
every layer) spreads N copies over L layers: the k-th has the k-th of N parts of the layers for its window. It begins
where the one before was waited for, the first one after the first layer, and is waited for at the end of its window.
Backward runs the same the other way round: a layer comes back beside the layers of its window, and is waited for before
the window below. So the same layers run beside each copy both ways, and what it takes longer than these, computing
waits. One copy is under way at a time; its layer is on the device until it ends.

Later versions of Transformer Engine start every copy as soon as its layer ends, which waits no longer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._check import check_offloaded_layers
from perfmodel.prediction._compose import LayoutBatch, pass_s
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._stages import by_layer
from perfmodel.prediction._zero import host_bandwidth
from perfmodel.program import WHOLE, Kind, Structure
from perfmodel.spec import Layout


class LayerCopies(NamedTuple):
    """Copies of a stack of layers, each way as many."""

    moved: Float[np.ndarray, "copies blocks"]
    """Blocks whose activations each carries."""
    beside: Float[np.ndarray, "copies blocks"]
    """Blocks that run beside each."""
    forward_at: Int[np.ndarray, " copies"]
    """Layers at whose end forward waits for each."""
    backward_at: Int[np.ndarray, " copies"]
    """Layers before whose backward each is waited for."""

    @classmethod
    def of(cls, blocks: ShardBlocks, offloaded: int) -> "LayerCopies":
        """Of the first `offloaded` layers of a model's blocks.

        Raises:
            LayoutError: there are no more layers than that.
        """
        _, upto, _ = by_layer(blocks.pairs)
        ends = window_ends(len(upto) - 1, offloaded)
        begins = np.append(0, ends)[:-1]  # the first copy waits for the first layer
        return cls(np.diff(upto[: offloaded + 1], axis=0), upto[ends + 1] - upto[begins + 1], ends, begins)

    def waits_s(
        self, bytes_of_block: Float[Any, " blocks"], bytes_per_s: Any, block_s: Float[Any, " blocks"]
    ) -> Float[Any, " copies"]:
        """What one way of a micro-batch waits for each copy.

        Args:
            bytes_of_block: activations that a block leaves behind.
            bytes_per_s: of the link to the host, one way.
            block_s: seconds of a block's pass; its array namespace is that of the result.
        """
        xp = block_s.__array_namespace__()
        return xp.maximum(self.moved @ bytes_of_block / bytes_per_s - self.beside @ block_s, 0.0)


class CopyClasses(NamedTuple):
    """Where passes wait for copies: how often each class of a program waits for each of them."""

    forward: Float[np.ndarray, "classes copies"]
    backward: Float[np.ndarray, "classes copies"]

    @classmethod
    def of(cls, copies: LayerCopies, structure: Structure, per_segment: Sequence[int]) -> "CopyClasses":
        """Of a program of one stage, whose segments hold so many layers each."""
        segment = np.repeat(np.arange(len(per_segment)), per_segment)
        kind, own = structure.class_kind[:, None], structure.class_segment[:, None]

        def waits(of: Kind, at: Int[np.ndarray, " copies"]) -> Float[np.ndarray, "classes copies"]:
            return ((kind == of) & ((own == WHOLE) | (own == segment[at]))).astype(float)

        return cls(waits(Kind.FORWARD, copies.forward_at), waits(Kind.BACKWARD, copies.backward_at))

    def seconds(
        self, copies: LayerCopies, bytes_of_block: Float[Any, " blocks"], bytes_per_s: Any,
        forward_s: Float[Any, " blocks"], backward_s: Float[Any, " blocks"],
    ) -> Float[Any, " classes"]:  # fmt: skip
        """What every class waits (see `LayerCopies.waits_s`)."""
        forward, backward = (copies.waits_s(bytes_of_block, bytes_per_s, own) for own in (forward_s, backward_s))
        return self.forward @ forward + self.backward @ backward


def window_ends(layers: int, offloaded: int) -> Int[np.ndarray, " offloaded"]:
    """The last layer of each copy's window: parts of the layers as even as can be, the longer ones first.

    Raises:
        LayoutError: see `check_offloaded_layers`.
    """
    check_offloaded_layers(layers, offloaded)
    each, longer = divmod(layers, max(offloaded, 1))
    return np.cumsum(each + (np.arange(offloaded) < longer)) - 1


def offloads_layers(problem: StepProblem, layout: Layout) -> bool:
    """Whether a step copies layers' activations to the host: without backward none are kept."""
    return layout.offload_layers > 0 and problem.job.mode == "train"


def copy_waits_s(problem: StepProblem, layout_batch: LayoutBatch) -> Float[np.ndarray, "lanes classes"]:
    """What every class of a bundle's program waits for copies, by layout.

    Raises:
        LayoutError: a layout offloads as many layers as there are, or the device entry does not tell of its host's
            link.
    """
    structure = layout_batch.program.structure
    out = np.zeros((len(layout_batch.layouts), structure.n_classes))
    if not any(offloads_layers(problem, layout) for layout in layout_batch.layouts):
        return out
    of_kind, kept = pass_s(problem, layout_batch), layout_batch.bytes.kept
    for lane, (layout, one) in enumerate(zip(layout_batch.layouts, layout_batch.composed, strict=True)):
        if not layout.offload_layers:
            continue
        copies = LayerCopies.of(one.events, layout.offload_layers)
        per_segment = (layout_batch.counts[0] @ one.events.layers).astype(int).tolist()
        out[lane] = CopyClasses.of(copies, structure, per_segment).seconds(
            copies, kept[lane], host_bandwidth(problem.cluster.device),
            of_kind[Kind.FORWARD][lane], of_kind[Kind.BACKWARD][lane],
        )  # fmt: skip
    return out
