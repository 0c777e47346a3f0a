"""Uneven stages by relaxation: layers dealt to stages as real numbers, down the gradient of a layout's own timeline."""

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import WholeShares
from perfmodel.prediction import StepProblem, bundles, by_layer, durations, pass_s, prepared
from perfmodel.program import Kind
from perfmodel.spec import Layout

_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def relaxed_partitions(problem: StepProblem, layout: Layout, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Rounded partitions of a layout's layers, of the fastest relaxed one first.

    Passes take what their stage holds relative to the even stages; everything else (transfers, reductions, optimizer)
    takes what it does there. Memory is left to whoever rounds: recompute that makes a stage fit is exact.

    Args:
        problem: model, job, cluster and cost models.
        layout: a pipeline whose schedule flushes, at least as many layers as stages.
        seed: of the starts.

    Raises:
        LayoutError: no stages to cut, or a schedule without a flush.
    """
    (bundle,) = bundles(problem, [layout.replace(partition=None, recompute_full_layers=None)])
    before, layers, after = by_layer(bundle.tables[0].pairs)
    stages = bundle.spec.n_stages
    if stages == 1 or bundle.spec.steps > 1 or len(layers) < stages:
        raise LayoutError(f"layout {layout} has no stages that a relaxation can cut")
    program = prepared(bundle.spec)
    structure = program.structure
    seconds = pass_s(problem, bundle)
    of_layer = np.stack([layers @ seconds[kind][0] for kind in _KINDS])
    prefix = np.concatenate([np.zeros((len(_KINDS), 1)), np.cumsum(of_layer, axis=1)], axis=1)
    ends = np.zeros((len(_KINDS), stages))
    ends[:, 0] += [before @ seconds[kind][0] for kind in _KINDS]
    ends[:, -1] += [after @ seconds[kind][0] for kind in _KINDS]
    even_s = np.stack([bundle.counts.sum(axis=1) @ seconds[kind][0] for kind in _KINDS])
    kind = np.array([_KINDS.index(Kind(k)) if k in _KINDS else len(_KINDS) for k in structure.class_kind.tolist()])
    constants = {
        "given": durations(problem, bundle)[0],
        "kind": kind,
        "stage": np.maximum(structure.class_stage, 0),
        "prefix": prefix,
        "ends": ends,
        "even": np.maximum(even_s, 1e-12),
    }
    relaxation = Relaxation({"layers": WholeShares(stages, len(layers), least=1)}, (program.compiled,), _durations,
                         constants)  # fmt: skip
    found = relax(relaxation, seed=seed)
    ranked = sorted(found.starts, key=lambda start: start[1])
    return list(dict.fromkeys(tuple(int(n) for n in values["layers"]) for values, *_ in ranked))


def _durations(values: Values) -> tuple[Float[Array, " classes"]]:
    prefix = values["prefix"]
    count = prefix.shape[1] - 1
    inner = jnp.cumsum(values["layers"])[:-1]
    cuts = jnp.concatenate([jnp.zeros(1), inner, jnp.array([float(count)])])
    held = jnp.stack([jnp.diff(jnp.interp(cuts, jnp.arange(count + 1), own)) for own in prefix]) + values["ends"]
    ratio = jnp.concatenate([held / values["even"], jnp.ones((1, held.shape[1]))])
    return (values["given"] * ratio[values["kind"], values["stage"]],)
