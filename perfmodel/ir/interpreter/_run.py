"""The reference interpreter: devices with only their own weights and received messages."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.ir.interpreter._layers import (
    LayeredModel,
    Params,
    forward,
    input_gradient,
    loss_and_gradient,
    weight_gradient,
)
from perfmodel.schedule import Phase, Schedule, WeightPolicy, require_valid, weight_versions


@dataclass(frozen=True, eq=False)
class ScheduleRun:
    """Losses, gradients and weights that a schedule computed."""

    losses: Float[np.ndarray, " micro_batches"]
    """Loss of every micro-batch (of every slice), in order of micro-batches."""
    gradients: list[Params]
    """Mean gradient over all micro-batches, one entry per layer; zero if weights were updated
    during the run."""
    params: list[Params]
    """Weights of every layer after the run."""
    versions_held: Int[np.ndarray, " devices"]
    """Most weight versions that each device held at once."""
    weights_after: dict[int, list[Params]] = field(default_factory=dict)
    """Weights of every layer after some updates, by number of the update."""


@dataclass
class _Saved:
    """Values that a forward pass saves for the backward pass, one per layer of the stage."""

    inputs: list[Array] = field(default_factory=list)
    contexts: list[tuple[Any, ...]] = field(default_factory=list)
    carried: list[Any] = field(default_factory=list)
    cotangents: list[tuple[Any, Any]] = field(default_factory=list)
    """Cotangents of the output and of the carried context; None before the first backward pass."""


def run_schedule(
    schedule: Schedule,
    model: LayeredModel,
    params: list[Params],
    inputs: Float[ArrayLike, "micro_batches ..."],
    targets: Float[ArrayLike, "micro_batches ..."],
    *,
    policy: WeightPolicy = "flush",
    learning_rate: float = 0.0,
    per_update: int = 1,
    keep_every: int = 0,
) -> ScheduleRun:
    """Run every instruction of a schedule, in order of slots, with messages between devices.

    Weights exist once per chunk and version on the device that holds them; activations and
    gradients are there only if an earlier instruction of the same device made them or another
    device sent them.

    Args:
        schedule: the order; its micro-batches (or slices) index the first axis of the data.
        model: cut into as many stages as the schedule has.
        params: initial weights of every layer.
        inputs, targets: one entry per micro-batch; of sliced sequences one per slice.
        policy: which weight version passes use, where the schedule updates weights.
        learning_rate: step size of plain gradient descent at every update.
        per_update: micro-batches per update, over which gradients are averaged.
        keep_every: weights are kept after every so many updates (0: after none).

    Raises:
        PerfModelError: a schedule that cannot run, or data for another number of micro-batches.
    """
    require_valid(schedule)
    inputs = jnp.asarray(inputs)
    targets = jnp.asarray(targets)
    if len(inputs) != schedule.micro_batches or len(targets) != schedule.micro_batches:
        raise PerfModelError(
            f"schedule {schedule.name} takes {schedule.micro_batches} micro-batches, got {len(inputs)} inputs "
            f"and {len(targets)} targets"
        )
    # Slot by slot. Devices of one slot run one after another here; messages are taken out of the
    # mail when read, so a schedule that needs a value too early fails instead of reading an old
    # one.
    machine = _Machine(schedule, model, params, policy, learning_rate, per_update, keep_every)
    for index in np.lexsort((schedule.device, schedule.slot)).tolist():
        machine.run(index, inputs, targets)
    return machine.result()


class _Machine:
    """All devices of a run."""

    def __init__(
        self,
        schedule: Schedule,
        model: LayeredModel,
        params: list[Params],
        policy: WeightPolicy,
        rate: float,
        per_update: int,
        keep_every: int,
    ) -> None:
        self.schedule = schedule
        self.model = model
        self.rate = rate
        self.per_update = per_update
        self.keep_every = keep_every
        self.weights_after: dict[int, dict[int, Params]] = {}
        self.layers = model.stages(schedule.n_stages)
        self.used = weight_versions(schedule, policy).used
        self.weights: dict[tuple[int, int], dict[int, list[Params]]] = {}
        for device, stages in enumerate(schedule.stage.tolist()):
            for chunk, stage in enumerate(stages):
                self.weights[device, chunk] = {0: [params[i] for i in self.layers[stage]]}
        self.newest = np.zeros(schedule.devices, np.int64)
        self.gradients: dict[tuple[int, int], list[Params]] = {}
        self.saved: dict[tuple[int, int, int], _Saved] = {}
        self.mail: dict[tuple[Phase, int, int], Array] = {}
        """Activations and gradients on their way to (stage, micro-batch)."""
        self.losses = np.zeros(schedule.micro_batches)
        self.versions_held = np.ones(schedule.devices, np.int64)
        # Last instruction that uses each version on each device; after it the version can go.
        self.last_use: dict[tuple[int, int], int] = {}
        for i, (device, version) in enumerate(
            zip(schedule.device.tolist(), self.used.tolist(), strict=True)
        ):
            self.last_use[device, version] = i

    def run(self, index: int, inputs: Array, targets: Array) -> None:
        """Run one instruction."""
        s = self.schedule
        slot = s[index]
        stage = int(s.instruction_stage[index])
        place = (slot.device, slot.chunk)
        # The policy (PipeDream, 2BW, ...) has chosen the version for every instruction beforehand.
        weights = self.weights[place][int(self.used[index])]
        # Whole backward passes are both halves, input gradient before weight gradient.
        for batch in range(slot.micro_batch, slot.micro_batch + slot.span):
            if slot.phase == Phase.FORWARD:
                self._forward(place, stage, batch, weights, inputs, targets)
            if slot.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT):
                self._backward(place, stage, batch, weights)
            if slot.phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
                self._weight_gradient(place, stage, batch, weights)
        if s.updates[index]:
            self._update(slot.device)
        self._forget(slot.device, index)

    def _forward(
        self,
        place: tuple[int, int],
        stage: int,
        batch: int,
        weights: list[Params],
        inputs: Array,
        targets: Array,
    ) -> None:
        """Run a stage's layers forward on a micro-batch; mail the result to the next stage."""
        # The first stage reads data, the last one computes the loss and mails itself the gradient.
        x = inputs[batch] if stage == 0 else self.mail.pop((Phase.FORWARD, stage, batch))
        first = batch - batch % self.schedule.slices
        saved = _Saved()
        for number, layer in enumerate(self.layers[stage]):
            # Later slices of a sequence see what earlier ones carried: attention its keys and
            # values.
            before = [
                self.saved[(*place, earlier)].carried[number] for earlier in range(first, batch)
            ]
            context = tuple(left_by_slice for left_by_slice in before if left_by_slice is not None)
            saved.inputs.append(x)
            saved.contexts.append(context)
            x, carried = forward(self.model.layers[layer].apply, weights[number], x, context)
            saved.carried.append(carried)
            saved.cotangents.append((None, None))
        self.saved[(*place, batch)] = saved
        if stage + 1 < self.schedule.n_stages:
            self.mail[Phase.FORWARD, stage + 1, batch] = x
        else:
            loss, gradient = loss_and_gradient(self.model.loss, x, targets[batch])
            self.losses[batch] = float(loss)
            self.mail[Phase.BACKWARD, stage, batch] = gradient

    def _backward(
        self, place: tuple[int, int], stage: int, batch: int, weights: list[Params]
    ) -> None:
        """Compute the gradients of a stage's inputs, and mail them to the stage before."""
        saved = self.saved[(*place, batch)]
        # Inputs and contexts are those of the forward; weights may be newer, as in frameworks that
        # do not stash versions.
        g = self.mail.pop((Phase.BACKWARD, stage, batch))
        first = batch - batch % self.schedule.slices
        for number in reversed(range(len(saved.inputs))):
            apply = self.model.layers[self.layers[stage][number]].apply
            # Gradients that later slices return for the keys and values of this one.
            carried_gradient = saved.cotangents[number][1]
            if carried_gradient is None:
                carried_gradient = jax.tree.map(jnp.zeros_like, saved.carried[number])
            saved.cotangents[number] = (g, carried_gradient)
            x, context = saved.inputs[number], saved.contexts[number]
            g, context_gradients = input_gradient(
                apply, weights[number], x, context, (g, carried_gradient)
            )
            # Layers without context return none, hence the uneven lengths.
            for earlier, part in zip(range(first, batch), context_gradients, strict=False):
                self._ask(self.saved[(*place, earlier)], number, part)
        if stage:
            self.mail[Phase.BACKWARD, stage - 1, batch] = g

    @staticmethod
    def _ask(saved: _Saved, number: int, part: Any) -> None:
        """Add to the gradient of the context that a slice left for later ones."""
        g, so_far = saved.cotangents[number]
        saved.cotangents[number] = (
            g,
            part if so_far is None else jax.tree.map(jnp.add, so_far, part),
        )

    def _weight_gradient(
        self, place: tuple[int, int], stage: int, batch: int, weights: list[Params]
    ) -> None:
        """Add a micro-batch's gradients of a stage's weights to those of its device."""
        saved = self.saved[(*place, batch)]
        new = [
            weight_gradient(
                self.model.layers[layer].apply,
                weights[number],
                saved.inputs[number],
                saved.contexts[number],
                saved.cotangents[number],
            )
            for number, layer in enumerate(self.layers[stage])
        ]
        # Gradients accumulate until an update of the device takes them.
        so_far = self.gradients.get(place)
        self.gradients[place] = new if so_far is None else jax.tree.map(jnp.add, so_far, new)

    def _update(self, device: int) -> None:
        """Make a new version of the weights on a device by gradient descent."""
        self.newest[device] += 1
        # Gradients are sums; an update applies their mean.
        step = self.rate / self.per_update

        def updated(weight: Array, gradient: Array) -> Array:
            return weight - step * gradient

        for chunk in range(self.schedule.chunks):
            versions = self.weights[device, chunk]
            gradient = self.gradients.pop((device, chunk))
            newest = int(self.newest[device])
            versions[newest] = jax.tree.map(updated, versions[newest - 1], gradient)
            if self.keep_every and newest % self.keep_every == 0:
                layers = self.layers[int(self.schedule.stage[device, chunk])]
                self.weights_after.setdefault(newest, {}).update(
                    zip(layers, versions[newest], strict=True)
                )

    def _forget(self, device: int, index: int) -> None:
        """Drop versions that are no longer used, except the newest; record how many were held."""
        for chunk in range(self.schedule.chunks):
            versions = self.weights[device, chunk]
            # While this instruction ran, the version that it made was not there.
            new_versions = int(self.schedule.updates[index])
            self.versions_held[device] = max(
                self.versions_held[device], len(versions) - new_versions
            )
            for version in [v for v in versions if v < self.newest[device]]:
                if self.last_use.get((device, version), -1) <= index:
                    del versions[version]

    def result(self) -> ScheduleRun:
        """Weights and gradients by layer; replicas' gradients are added up, as by all-reduce."""
        s = self.schedule
        if self.mail:
            raise PerfModelError(
                f"schedule {s.name}: {len(self.mail)} messages were never received"
            )
        # A stage that several devices hold (bidirectional schedules) has a share of the gradient on
        # each.
        gradients: dict[int, list[Params]] = {}
        params: dict[int, Params] = {}
        for (device, chunk), versions in self.weights.items():
            stage = int(s.stage[device, chunk])
            newest = versions[int(self.newest[device])]
            gradient: list[Params] = self.gradients.get((device, chunk)) or jax.tree.map(
                jnp.zeros_like, newest
            )
            if stage not in gradients:
                gradients[stage] = gradient
            else:
                gradients[stage] = jax.tree.map(jnp.add, gradients[stage], gradient)
            params |= dict(zip(self.layers[stage], newest, strict=True))

        # Each micro-batch's loss is a mean over its samples, so the step's gradient is their mean.
        micro_batches = s.micro_batches
        by_layer: list[Params] = []
        for stage in range(s.n_stages):
            by_layer += gradients[stage]
        mean = jax.tree.map(lambda g: g / micro_batches, by_layer)
        order = range(len(self.model.layers))
        weights_after = {}
        for update, layer_weights in self.weights_after.items():
            weights_after[update] = [layer_weights[i] for i in order]
        return ScheduleRun(
            self.losses, mean, [params[i] for i in order], self.versions_held, weights_after
        )
