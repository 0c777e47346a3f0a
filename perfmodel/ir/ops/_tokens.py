"""Embeddings, the pieces of a cross-entropy that vocabularies spread over devices allow, the
largest entries of rows, and the routing of each token to its best expert (Fedus et al. 2021,
section 2.1).

The `offset` of a table's or row's first entry is 0 unless the vocabulary is sharded (Megatron-LM's
vocabulary-parallel embedding and loss, Shoeybi et al. 2019, section 3). The row `padding` of an
embedding is not trained, as PyTorch's `padding_idx` is not.

Experts take their tokens from buffers of fixed capacity; a token beyond it is dropped (zeros come
back). Sharding tokens shards the capacity: each part fills its own share of every buffer, in its
own order.
"""

from math import prod

from perfmodel.ir._instruction import Instruction, RuleError, Tensor
from perfmodel.ir.op_definition import (
    REPLICATED,
    Emitter,
    GradientRule,
    InferRule,
    Names,
    OpDefinition,
    Partial,
    Sharded,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    WorkRule,
    kernel_dtype,
    memory_bound,
    operands,
    require_gradient_of,
    required,
    table,
)
from perfmodel.ops import Embedding, Op


def _integers(tensor: Tensor) -> None:
    if not tensor.dtype.startswith("int"):
        raise RuleError(f"token numbers must be integers, got {tensor.dtype}")


def _rows(tensor: Tensor) -> None:
    if tensor.rank < 1:
        raise RuleError("a tensor of at least one dimension is needed")


def _embedding(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a look-up of tokens in a table of embeddings."""
    operands(2, inputs)
    rows, ids = inputs
    _integers(ids)
    if rows.rank != 2:
        raise RuleError(f"the table must be a matrix, got shape {rows.shape}")
    return (rows.with_shape((*ids.shape, rows.shape[1])),)


def _for_first_operand(op: str) -> GradientRule:
    """Return the gradient rule of a look-up: op `op` gives the first operand's gradient; token
    numbers have none."""
    return lambda emitter, instruction, dy: (
        *emitter.emit(
            op,
            (*instruction.inputs, dy),
            (f"grad_{instruction.inputs[0]}",),
            instruction.attributes,
        ),
        None,
    )


def _first_grad(forward: InferRule) -> InferRule:
    """Return the type rule of a look-up's gradient: the type of the first operand.

    The last operand must have the shape of what `forward` gives.
    """

    def infer(inputs: Tensors, attributes: Values) -> Tensors:
        operands(3, inputs)
        (out,) = forward(inputs[:2], attributes)
        require_gradient_of(out, inputs[2])
        return inputs[:1]

    return infer


def _shard_embedding(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of an embedding: by rows or columns of the table, or by tokens."""
    by_row = query.sharded_axis(0)
    by_token = query.sharded_axis(1)
    rows = query.operands[0]
    # Each part looks up the rows that it has, and gives zeros for the others.
    if by_row == 0:
        local = rows.shape[0] // query.parts
        return ShardingDecision((Sharded(0), REPLICATED), (Partial("sum"),), offset_step=local)
    # A table sharded by columns gives every token a slice of its embedding.
    if by_row == 1:
        return ShardingDecision((Sharded(1), REPLICATED), (Sharded(query.outputs[0].rank - 1),))
    if by_token is not None:
        return ShardingDecision((REPLICATED, Sharded(by_token)), (Sharded(by_token),))
    return query.replicated()


def _gradients_pass(query: ShardingQuery) -> ShardingDecision | None:
    """Partial rule of a table's gradient, which is linear in the gradients of its rows."""
    # Partial gradients of the looked-up rows may be scattered into the table before they are
    # summed.
    table, ids, dy = query.shardings
    if (table, ids, dy) != (REPLICATED, REPLICATED, Partial("sum")):
        return None
    return ShardingDecision(query.shardings, (Partial("sum"),))


def _shard_embedding_grad(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of an embedding's gradient: by rows or columns of the table, or partial."""
    rows, _, dy = query.operands
    by_row, by_token, by_gradient = map(query.sharded_axis, range(3))
    if by_row == 0:
        local = rows.shape[0] // query.parts
        return ShardingDecision(
            (Sharded(0), REPLICATED, REPLICATED), (Sharded(0),), offset_step=local
        )
    # Columns are independent, so a gradient sharded along the hidden axis gives a table sharded by
    # columns.
    if by_row == 1 or by_gradient == dy.rank - 1:
        return ShardingDecision((Sharded(1), REPLICATED, Sharded(dy.rank - 1)), (Sharded(1),))
    # Each part has seen some tokens only: its gradient of the table is a partial sum.
    axis = by_token if by_token is not None else by_gradient
    if axis is not None:
        return ShardingDecision((REPLICATED, Sharded(axis), Sharded(axis)), (Partial("sum"),))
    return query.replicated()


def _row_max(inputs: Tensors, attributes: Values) -> Tensors:
    operands(1, inputs)
    (x,) = inputs
    _rows(x)
    return (x.with_shape((*x.shape[:-1], 1)),)


def _shard_row_max(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of a maximum over the last axis."""
    axis = query.sharded_axis(0)
    if axis is None:
        return query.replicated()
    # Parts that have slices of a row know its maximum among theirs: a partial maximum, completed by
    # an all-reduce.
    if axis == query.operands[0].rank - 1:
        return ShardingDecision((Sharded(axis),), (Partial("max"),))
    return ShardingDecision((Sharded(axis),), (Sharded(axis),))


def _pick(inputs: Tensors, attributes: Values) -> Tensors:
    operands(2, inputs)
    x, labels = inputs
    _integers(labels)
    if labels.shape != x.shape[:-1]:
        raise RuleError(f"labels must have shape {x.shape[:-1]}, got {labels.shape}")
    return (x.with_shape((*labels.shape, 1)),)


def _shard_pick(query: ShardingQuery) -> ShardingDecision:
    """Sharding of `pick` or `pick_grad`: along the batch, or partial sums over classes."""
    x = query.operands[0]
    # Serves `pick` (labels) and `pick_grad` (labels and gradient).
    n_values = len(query.operands) - 1
    sharded_axes = [query.sharded_axis(operand) for operand in range(n_values + 1)]
    axis = next((sharded for sharded in sharded_axes if sharded is not None), None)
    if axis is None:
        return query.replicated()
    if axis < x.rank - 1:
        return ShardingDecision((Sharded(axis),) * (n_values + 1), (Sharded(axis),))
    # Vocabulary-parallel loss: the part that has the label's entry gives it, the others give zeros.
    # The gradient has the sharding of the row.
    local = x.shape[-1] // query.parts
    out = Partial("sum") if n_values == 1 else Sharded(axis)
    return ShardingDecision((Sharded(axis), *((REPLICATED,) * n_values)), (out,), offset_step=local)


def _embedding_work(backward: bool) -> WorkRule:
    """Work rule of a look-up in a table of embeddings, or of its gradient."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
        rows, ids = inputs[:2]
        kernel = Embedding(
            dtype=kernel_dtype(rows),
            tokens=prod(ids.shape),
            hidden=rows.shape[1],
            vocab=rows.shape[0],
            pass_="bwd" if backward else "fwd",
        )
        return (kernel,)

    return work


def _argmax(inputs: Tensors, attributes: Values) -> Tensors:
    operands(1, inputs)
    (x,) = inputs
    _rows(x)
    return (Tensor("int32", x.shape[:-1], x.device),)


def _shard_argmax(query: ShardingQuery) -> ShardingDecision:
    last = query.operands[0].rank - 1
    return query.all_along_one_axis(lambda axis: axis < last)


def _top_k(inputs: Tensors, attributes: Values) -> Tensors:
    """The k largest entries of every row, largest first, and their positions."""
    operands(1, inputs)
    (x,) = inputs
    _rows(x)
    k = required(attributes, "k", int)
    if not 1 <= k <= x.shape[-1]:
        raise RuleError(f"k={k} must be between 1 and the {x.shape[-1]} entries of a row")
    shape = (*x.shape[:-1], k)
    return x.with_shape(shape), Tensor("int32", shape, x.device)


def _top_k_gradient(
    emitter: Emitter, instruction: Instruction, dy: str | None, _: str | None
) -> Names:
    """Gradients return to the positions of the entries; positions have no gradient."""
    if dy is None:
        return (None,)
    return emitter.emit(
        "top_k_grad",
        (instruction.inputs[0], instruction.outputs[1], dy),
        (f"grad_{instruction.inputs[0]}",),
    )


def _top_k_grad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of the gradient of the largest entries of each row."""
    operands(3, inputs)
    x, places, dy = inputs
    _integers(places)
    require_gradient_of(places, dy)
    if places.shape[:-1] != x.shape[:-1]:
        raise RuleError(
            f"places {places.shape} and values {x.shape} must have the same shape but for the last axis"
        )
    return inputs[:1]


def _dispatch(inputs: Tensors, attributes: Values) -> Tensors:
    """Tokens [.., hidden] and their experts [..] to buffers [experts, capacity, hidden]."""
    operands(2, inputs)
    x, chosen = inputs
    experts = required(attributes, "experts", int)
    capacity = required(attributes, "capacity", int)
    if chosen.shape != x.shape[:-1] or not chosen.dtype.startswith("int"):
        raise RuleError(
            f"an expert number for each of {x.shape[:-1]} tokens is needed, got {chosen}"
        )
    return (x.with_shape((experts, capacity, x.shape[-1])),)


def _shard_dispatch(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of a dispatch to experts: by tokens, as a share of each expert's buffer."""
    # Parts fill a share of every expert's buffer with their own tokens, so sharded tokens become a
    # sharded capacity; an all-to-all then brings whole buffers to the experts' devices.
    sharded_axes = [query.sharded_axis(operand) for operand in (0, 1)]
    tokens = [axis for axis in sharded_axes if axis is not None and axis < query.operands[1].rank]
    capacity = query.attributes["capacity"]
    if not tokens:
        return query.replicated()
    if capacity % query.parts:
        raise RuleError(f"capacity {capacity} is not divisible by {query.parts} parts")
    spread = Sharded(tokens[0])
    return ShardingDecision(
        (spread, spread), (Sharded(1),), (("capacity", capacity // query.parts),)
    )


def _collect(inputs: Tensors, attributes: Values) -> Tensors:
    """Turn buffers [experts, capacity, hidden] and experts [..] into tokens [.., hidden]."""
    operands(2, inputs)
    buffers, chosen = inputs
    if buffers.rank != 3 or not chosen.dtype.startswith("int"):
        raise RuleError(
            f"buffers [experts, capacity, hidden] and expert numbers are needed, got {buffers}, {chosen}"
        )
    return (buffers.with_shape((*chosen.shape, buffers.shape[2])),)


def _collect_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    experts, capacity, _ = emitter.types[instruction.inputs[0]].shape
    chosen = instruction.inputs[1]
    d_buffers = emitter.op("dispatch", dy, chosen, experts=experts, capacity=capacity)
    return d_buffers, None


def _shard_collect(query: ShardingQuery) -> ShardingDecision:
    # The way back: tokens find their results in the share of the capacity that they filled
    # themselves.
    axis = query.sharded_axis(1)
    if axis is None:
        return query.replicated()
    return ShardingDecision((Sharded(1), Sharded(axis)), (Sharded(axis),))


TOKENS = table(
    OpDefinition(
        name="embedding",
        infer=_embedding,
        work=_embedding_work(backward=False),
        gradient=_for_first_operand("embedding_grad"),
        shard=_shard_embedding,
    ),
    OpDefinition(
        name="embedding_grad",
        infer=_first_grad(_embedding),
        work=_embedding_work(backward=True),
        shard=_shard_embedding_grad,
        partial=_gradients_pass,
    ),
    # a shift that keeps exponentials in range: what depends on it cancels, so it counts as a
    # constant
    OpDefinition(
        name="row_max", infer=_row_max, work=memory_bound("row_max"), shard=_shard_row_max
    ),
    OpDefinition(
        name="pick",
        infer=_pick,
        work=memory_bound("row_max"),
        gradient=_for_first_operand("pick_grad"),
        shard=_shard_pick,
    ),
    OpDefinition(
        name="pick_grad", infer=_first_grad(_pick), work=memory_bound("copy"), shard=_shard_pick
    ),
    OpDefinition(name="argmax", infer=_argmax, work=memory_bound("row_max"), shard=_shard_argmax),
    OpDefinition(
        name="top_k",
        infer=_top_k,
        work=memory_bound("row_max"),
        gradient=_top_k_gradient,
        shard=_shard_argmax,
    ),
    OpDefinition(
        name="top_k_grad", infer=_top_k_grad, work=memory_bound("copy"), shard=_shard_argmax
    ),
    OpDefinition(
        name="dispatch",
        infer=_dispatch,
        work=memory_bound("copy"),
        shard=_shard_dispatch,
        gradient=lambda emitter, instruction, dy: (
            emitter.op("collect", dy, instruction.inputs[1]),
            None,
        ),
    ),
    OpDefinition(
        name="collect",
        infer=_collect,
        work=memory_bound("copy"),
        gradient=_collect_gradient,
        shard=_shard_collect,
    ),
)
