"""Uneven stages by relaxation: layers dealt to stages as real numbers, down the gradient of a layout's own timeline."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import WholeShares
from perfmodel.prediction import StepProblem
from perfmodel.prediction.differentiable import Programs, step_time_function_of
from perfmodel.spec import Layout


def relaxed_partitions(problem: StepProblem, layout: Layout) -> list[tuple[int, ...]]:
    """Rounded partitions of a layout's layers, of the fastest relaxed one first.

    The step is that of `perfmodel.step_time_function`. Memory is left to whoever rounds: recompute that makes a stage
    fit is exact.

    Args:
        problem: model, job, cluster and cost models.
        layout: a pipeline whose schedule flushes, at least as many layers as stages.

    Raises:
        LayoutError: no stages to cut, or a schedule without a flush.
    """
    even = layout.replace(partition=None, recompute_full_layers=None)
    function = step_time_function_of(problem, even, vary="layers")
    nominal, programs = function.nominal, function.programs
    stages, layers = len(nominal.layers), int(nominal.layers.sum())
    if stages == 1 or len(programs.steps) > 1 or layers < stages:
        raise LayoutError(f"layout {layout} has no stages that a relaxation can cut")
    constants = {"tables": function.tables, "nominal": nominal, "times": function.times}
    variables = {"layers": WholeShares(stages, layers, least=1)}
    found = relax(Relaxation(variables, (programs.prepared[0].compiled,), _Durations(programs), constants))
    ranked = sorted(found.starts, key=lambda start: start[1])
    return list(dict.fromkeys(tuple(int(n) for n in values["layers"]) for values, *_ in ranked))


@dataclass(frozen=True)
class _Durations:
    programs: Programs

    def __call__(self, values: Values) -> tuple[Float[Array, " classes"]]:
        x = values["nominal"]._replace(layers=values["layers"])
        return (self.programs.durations(values["tables"], x, values["times"]),)
