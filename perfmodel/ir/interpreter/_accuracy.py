"""Accuracy on test examples by epochs and by predicted time, under a schedule's weight versions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from perfmodel.errors import PerfModelError
from perfmodel.ir.interpreter._layers import LayeredModel, Params, conv_model, mlp_model
from perfmodel.ir.interpreter._training import as_mini_batches, train, update_times
from perfmodel.schedule import PassTimes
from perfmodel.units import number_of

WIDTH: Final = 32
"""Width of the model, and number of features of a place."""
DIGIT_SIZE: Final = 8
"""Height and width of a digit's image."""
DIGIT_CHANNELS: Final = (1, 8, 8, 16, 16)
"""Channels of a digit's image, and of the output of every convolution."""
_DIGITS: Final = 10
_DARKEST: Final = 16
_TEST_SHARE: Final = 0.2


@dataclass(frozen=True, eq=False)
class Places:
    """A classification task: land (+1) or sea (-1) at points of a real map."""

    features: Float[np.ndarray, "places width"]
    labels: Float[np.ndarray, " places"]
    test_features: Float[np.ndarray, "tests width"]
    test_labels: Float[np.ndarray, " tests"]


def land_or_sea(seed: int) -> Places:
    """The coast of Vancouver Island: heights of 91 x 120 places that matplotlib ships
    (`topobathy.npz`, from NOAA's ETOPO), shuffled and split by `seed`. Features are sines of the
    coordinates with fixed random frequencies.

    Raises:
        PerfModelError: matplotlib is not installed.
    """
    try:
        from matplotlib import cbook
    except ImportError:
        raise PerfModelError(
            "training on real data needs a map that comes with matplotlib; run pip install matplotlib"
        ) from None
    with np.load(str(cbook.get_sample_data("topobathy.npz", asfileobj=False))) as data:
        height = np.asarray(data["topo"], float)
        east = np.asarray(data["longitude"], float)
        north = np.asarray(data["latitude"], float)
    # Random Fourier features of the two coordinates. Their generator is fixed, so seeds differ in
    # split and weights only.
    unit = [(axis - axis.min()) / np.ptp(axis) for axis in (east, north)]
    points = np.stack(np.meshgrid(*unit), axis=-1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    frequencies = rng.normal(scale=6, size=(2, WIDTH))
    phases = rng.uniform(0, 2 * np.pi, WIDTH)
    features = np.sqrt(2) * np.sin(points @ frequencies + phases)
    labels = np.where(height.ravel() > 0, 1.0, -1.0)
    # A test set drawn at random from the same map.
    order = np.random.default_rng(seed).permutation(len(points))
    tests, training = np.split(order, [int(_TEST_SHARE * len(order))])
    return Places(features[training], labels[training], features[tests], labels[tests])


@dataclass(frozen=True, eq=False)
class Task:
    """A learning task: training examples, model and test examples."""

    model: LayeredModel
    inputs: Float[np.ndarray, "examples ..."]
    targets: Float[np.ndarray, "examples ..."]
    """Targets in the form that the model's loss takes."""
    test_inputs: Float[np.ndarray, "tests ..."]
    is_right: Callable[[Float[np.ndarray, "tests ..."]], Bool[np.ndarray, " tests"]]
    """Whether each output for the test set gives the right class."""


def map_task(seed: int, stages: int) -> Task:
    """A dense network with a layer for every stage on `land_or_sea`."""
    places = land_or_sea(seed)
    targets = np.broadcast_to(places.labels[:, None], (len(places.labels), WIDTH))
    return Task(
        model=mlp_model(WIDTH, stages),
        inputs=places.features,
        targets=np.array(targets),
        test_inputs=places.test_features,
        is_right=lambda outputs: np.sign(outputs.mean(axis=1)) == places.test_labels,
    )


def digits_task(seed: int, stages: int) -> Task:
    """A convolutional network on the 1,797 handwritten digits of 8 x 8 pixels that scikit-learn
    ships (from the UCI machine learning repository), shuffled and split by `seed`.

    Raises:
        PerfModelError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PerfModelError(
            "training on handwritten digits needs data that comes with scikit-learn; run pip install scikit-learn"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = np.asarray(pixels, float).reshape(-1, DIGIT_SIZE, DIGIT_SIZE, 1) / _DARKEST
    order = np.random.default_rng(seed).permutation(len(images))
    tests, training = np.split(order, [int(_TEST_SHARE * len(order))])
    return Task(
        model=conv_model(DIGIT_CHANNELS, DIGIT_SIZE, _DIGITS),
        inputs=images[training],
        targets=np.eye(_DIGITS)[labels[training]],
        test_inputs=images[tests],
        is_right=lambda outputs: outputs.argmax(axis=1) == labels[tests],
    )


@dataclass(frozen=True, eq=False)
class AccuracyCurve:
    """Accuracy after every epoch under one schedule."""

    schedule: str
    time_s: Float[np.ndarray, " epochs"]
    """Time at which every device has made the epoch's last update, in the predicted timeline."""
    accuracy: Float[np.ndarray, " epochs"]
    """Share of the test examples whose class is right."""

    def reaches(self, target: float) -> tuple[float, float]:
        """Epochs and time to a target accuracy; infinite if not reached."""
        reached = np.flatnonzero(self.accuracy >= target)
        if not len(reached):
            return np.inf, np.inf
        first = reached[0]
        return float(first + 1), float(self.time_s[first])


def accuracy_curve(
    name: str,
    passes: PassTimes,
    *,
    micro_batches: int,
    mini_batch: int,
    epochs: int,
    learning_rate: float,
    seed: int,
    task: Callable[[int, int], Task] = map_task,
) -> AccuracyCurve:
    """Train a network in as many stages as `passes` has in mini-batches of one size.

    Args:
        name: registered schedule.
        passes: seconds of the passes of one micro-batch on each stage.
        micro_batches: micro-batches per mini-batch; schedules that update after every one get it
            whole.
        mini_batch: examples per update.
        epochs: passes over the training examples.
        learning_rate: step size of plain gradient descent.
        seed: random seed of split, order and initial weights.
        task: makes data and model of a seed and a number of stages.

    Raises:
        PerfModelError: mini-batches that do not divide, or are larger than the data.
    """
    # Examples are laid out as [micro-batch of all epochs, example], the form that schedules index.
    if mini_batch % micro_batches:
        raise PerfModelError(
            f"mini-batch {mini_batch} is not divisible into {number_of(micro_batches, 'micro-batch')}"
        )
    # All schedules see the same examples in the same order, so curves differ by weight versions and
    # time alone.
    stages = len(passes.forward_s)
    rng = np.random.default_rng(seed)
    learned = task(seed, stages)
    examples = len(learned.inputs)
    steps = examples // mini_batch
    if not steps:
        raise PerfModelError(
            f"mini-batch {mini_batch} is larger than the {examples} training examples"
        )
    order = np.concatenate([rng.permutation(examples)[: steps * mini_batch] for _ in range(epochs)])
    shape = (epochs * steps * micro_batches, mini_batch // micro_batches)
    inputs = learned.inputs[order].reshape(*shape, *learned.inputs.shape[1:])
    targets = learned.targets[order].reshape(*shape, *learned.targets.shape[1:])
    per_step, inputs, targets, passes = as_mini_batches(
        name, micro_batches, inputs, targets, passes
    )
    run = train(
        name,
        learned.model,
        learned.model.initial(seed),
        inputs,
        targets,
        stages=stages,
        per_step=per_step,
        learning_rate=learning_rate,
        keep_every=steps,
    )
    # The last update of each epoch.
    time_s = update_times(name, stages, per_step, epochs * steps, passes)[steps - 1 :: steps]
    return AccuracyCurve(
        name,
        time_s,
        np.array([_accuracy(learned, run.weights_after[k]) for k in sorted(run.weights_after)]),
    )


def _accuracy(task: Task, params: Sequence[Params]) -> float:
    # Tests see the newest weights of every layer, as a checkpoint would hold them.
    outputs = task.model.output(params, jnp.asarray(task.test_inputs))
    return float(task.is_right(np.asarray(outputs)).mean())


@dataclass(frozen=True)
class TimeToAccuracy:
    """Epochs and time to a target accuracy, over several seeds of a schedule: least and most of
    those that reach it."""

    schedule: str
    reached: int
    epochs: tuple[float, float] | None
    time_s: tuple[float, float] | None
    last_accuracy: tuple[float, float]
    """Least and most accuracy after the last epoch, over all seeds."""

    @classmethod
    def of(cls, curves: Sequence[AccuracyCurve], target: float) -> "TimeToAccuracy":
        """The summary of one curve per seed."""
        # Seeds that never reach the target are counted, not averaged.
        epochs, times_s = [], []
        for curve in curves:
            reached_after, time_s = curve.reaches(target)
            if np.isfinite(reached_after):
                epochs.append(reached_after)
                times_s.append(time_s)
        last = [float(curve.accuracy[-1]) for curve in curves]
        return cls(
            curves[0].schedule, len(epochs), _span(epochs), _span(times_s), (min(last), max(last))
        )


def _span(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None
