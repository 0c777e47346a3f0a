"""Pipeline stages that a framework balances by cost instead of by number of layers."""

from itertools import accumulate

from perfmodel.spec._model import Model, Transformer
from perfmodel.spec.notation import PerStage


def partition_by_cost(model: Model, stages: int) -> PerStage:
    """Layers per stage, balanced by multiplications as in nanotron's `build_model`.

    A layer costs 4 h^2 (with grouped keys and values, and with heads of another size, too) + 3 h f,
    or 2 h f without a gate; the head costs h V. None (even stages) where there are too few layers.
    """
    if stages == 1 or not isinstance(model, Transformer):
        return None
    ffn_products = model.inner_projections + 1
    layer_cost = 4 * model.hidden**2 + ffn_products * model.hidden * model.ffn_hidden
    head_cost = model.hidden * model.vocab
    cumulative_costs = list(accumulate([layer_cost] * model.layers + [head_cost]))
    total_cost = cumulative_costs[-1]

    # A stage is closed by the first block that carries the sum beyond its share.
    layers_of_stage = [0] * stages
    stage = 0
    for cost in cumulative_costs[:-1]:
        layers_of_stage[stage] += 1
        stage += cost > total_cost * (stage + 1) / stages

    # Stages near the end may be left without a layer (they hold the head or the loss alone): each
    # takes one from the stage before it that has several.
    for stage in range(stages - 2, 0, -1):
        donor = next((i for i in range(stage - 1, -1, -1) if layers_of_stage[i] > 1), None)
        if layers_of_stage[stage] == 0 and donor is not None:
            layers_of_stage[donor] -= 1
            layers_of_stage[stage] = 1
    return tuple(layers_of_stage) if all(layers_of_stage[:-1]) else None
