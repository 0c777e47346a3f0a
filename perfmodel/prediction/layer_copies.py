"""Offloading of the first layers' activations to the host, and the waits for their copies
(`Layout.offload_layers`).

Transformer Engine (pytorch/cpu_offload.py, `AsyncDoubleBufferGroupOffloadHandler`, which
Megatron-Core calls after every layer) spreads N copies over L layers: the k-th has the k-th of N
parts of the layers for its window. It begins where the one before was waited for, the first one
after the first layer, and is waited for at the end of its window. Backward runs the same the other
way round: a layer comes back beside the layers of its window, and is waited for before the window
below. So the same layers run beside each copy both ways, and computation waits for the rest of a
copy that takes longer. One copy is under way at a time; its layer is on the device until it ends.

Later versions of Transformer Engine start every copy as soon as its layer ends, which waits no
longer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._check import check_offloaded_layers
from perfmodel.prediction._compose import LayoutBatch, pass_s
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.host import host_bandwidth
from perfmodel.program import WHOLE, Kind, Structure, by_layer
from perfmodel.spec import Layout


class LayerCopies(NamedTuple):
    """Copies of layers' activations to the host and back."""

    moved: Float[np.ndarray, "copies blocks"]
    """Blocks whose activations each copy carries."""
    beside: Float[np.ndarray, "copies blocks"]
    """Blocks that run during each copy."""
    forward_at: Int[np.ndarray, " copies"]
    """Layers after which the forward pass waits for each copy."""
    backward_at: Int[np.ndarray, " copies"]
    """Layers whose backward pass waits for each copy."""

    @classmethod
    def of(cls, blocks: ShardBlocks, offloaded: int) -> "LayerCopies":
        """Plan the copies for the first `offloaded` layers.

        Raises:
            LayoutError: there are no more layers than that.
        """
        cumulative = by_layer(blocks.pairs).cumulative
        ends = window_ends(len(cumulative) - 1, offloaded)
        # The first copy begins when its own layer, the first one, has run; every other where the
        # one before it ended.
        begins = np.append(0, ends)[:-1]
        return cls(
            moved=np.diff(cumulative[: offloaded + 1], axis=0),
            beside=cumulative[ends + 1] - cumulative[begins + 1],
            forward_at=ends,
            backward_at=begins,
        )

    def waits_s(
        self,
        bytes_of_block: Float[Any, " blocks"],
        bytes_per_s: Any,
        block_s: Float[Any, " blocks"],
    ) -> Float[Any, " copies"]:
        """Seconds that a pass of a micro-batch waits for each copy.

        Args:
            bytes_of_block: activations that a block leaves behind.
            bytes_per_s: rate of the link to the host, one way.
            block_s: seconds of a block's pass; its array namespace is that of the result.
        """
        xp = block_s.__array_namespace__()
        copy_s = self.moved @ bytes_of_block / bytes_per_s
        overlapped_s = self.beside @ block_s
        return xp.maximum(copy_s - overlapped_s, 0.0)


class CopyClasses(NamedTuple):
    """How often each class of a program waits for each copy."""

    forward: Float[np.ndarray, "classes copies"]
    """Waits of forward passes."""
    backward: Float[np.ndarray, "classes copies"]
    """Waits of backward passes."""

    @classmethod
    def of(
        cls, copies: LayerCopies, structure: Structure, per_segment: Sequence[int]
    ) -> "CopyClasses":
        """Find the copies that each pass of a single-stage program waits for.

        Args:
            per_segment: layers of each segment.
        """
        segment_of_layer = np.repeat(np.arange(len(per_segment)), per_segment)
        class_kind, class_segment = structure.class_kind[:, None], structure.class_segment[:, None]

        def waits(
            kind: Kind, layers: Int[np.ndarray, " copies"]
        ) -> Float[np.ndarray, "classes copies"]:
            has_layer = (class_segment == WHOLE) | (class_segment == segment_of_layer[layers])
            return ((class_kind == kind) & has_layer).astype(float)

        return cls(waits(Kind.FORWARD, copies.forward_at), waits(Kind.BACKWARD, copies.backward_at))

    def seconds(
        self,
        copies: LayerCopies,
        bytes_of_block: Float[Any, " blocks"],
        bytes_per_s: Any,
        forward_s: Float[Any, " blocks"],
        backward_s: Float[Any, " blocks"],
    ) -> Float[Any, " classes"]:
        """Seconds that every class waits.

        Args:
            bytes_of_block, bytes_per_s: see `LayerCopies.waits_s`.
            forward_s, backward_s: seconds of a block's forward and backward pass.
        """
        forward_waits_s = copies.waits_s(bytes_of_block, bytes_per_s, forward_s)
        backward_waits_s = copies.waits_s(bytes_of_block, bytes_per_s, backward_s)
        return self.forward @ forward_waits_s + self.backward @ backward_waits_s


def window_ends(layers: int, offloaded: int) -> Int[np.ndarray, " offloaded"]:
    """The last layer of each copy's window: parts of the layers as even as can be, the longer ones
    first.

    Raises:
        LayoutError: see `check_offloaded_layers`.
    """
    check_offloaded_layers(layers, offloaded)
    layers_per_window, longer = divmod(layers, max(offloaded, 1))
    return np.cumsum(layers_per_window + (np.arange(offloaded) < longer)) - 1


def offloads_layers(problem: StepProblem, layout: Layout) -> bool:
    """Whether a step copies layers' activations to the host; never without a backward pass."""
    return layout.offload_layers > 0 and problem.job.mode == "train"


def copy_waits_s(
    problem: StepProblem, layout_batch: LayoutBatch
) -> Float[np.ndarray, "lanes classes"]:
    """Seconds that every class of a batch's program waits for copies, by layout.

    Raises:
        LayoutError: a layout offloads as many layers as there are, or the device entry does not
            tell of its host's link.
    """
    structure = layout_batch.program.structure
    waits_s = np.zeros((len(layout_batch.layouts), structure.n_classes))
    if not any(offloads_layers(problem, layout) for layout in layout_batch.layouts):
        return waits_s
    # A copy hides behind the passes of the layers in its window; the rest of it is waited for.
    seconds_of_pass = pass_s(problem, layout_batch)
    kept_bytes = layout_batch.bytes.kept_bytes
    for lane, (layout, terms) in enumerate(
        zip(layout_batch.layouts, layout_batch.composed, strict=True)
    ):
        if not layout.offload_layers:
            continue
        copies = LayerCopies.of(terms.events, layout.offload_layers)
        per_segment = (layout_batch.program.counts[0] @ terms.events.layers).astype(int).tolist()
        waits_s[lane] = CopyClasses.of(copies, structure, per_segment).seconds(
            copies,
            bytes_of_block=kept_bytes[lane],
            bytes_per_s=host_bandwidth(problem.cluster.device),
            forward_s=seconds_of_pass[Kind.FORWARD][lane],
            backward_s=seconds_of_pass[Kind.BACKWARD][lane],
        )
    return waits_s
