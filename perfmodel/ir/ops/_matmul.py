"""Matrix products: plain and batched, and the weight gradient that also sums over leading axes."""

from math import prod

from perfmodel.ir._instruction import Instruction, RuleError
from perfmodel.ir.op_definition import (
    REPLICATED,
    Emitter,
    Names,
    OpDefinition,
    Partial,
    Sharded,
    Sharding,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    kernel_dtype,
    operands,
    table,
)
from perfmodel.ir.ops._elementwise import same_dtype
from perfmodel.ops import Gemm, Op

Labels = tuple[str, ...]


def _labels(inputs: Tensors, attributes: Values) -> tuple[Labels, Labels, Labels]:
    """Einsum labels of both operands and the output: `0`, `1`, .. for batch axes, m, n, k."""
    # Labels turn sharding into bookkeeping: a label of the result is cut there too, a label that is
    # summed over leaves partial sums. A matrix on the right is shared by the batch.
    a, b = inputs
    batch = tuple(map(str, range(a.rank - 2)))
    labels_a = ("k", "m") if attributes.get("transpose_a") else ("m", "k")
    labels_b = ("n", "k") if attributes.get("transpose_b") else ("k", "n")
    if b.rank > 2:
        labels_b = (*batch, *labels_b)
    return (*batch, *labels_a), labels_b, (*batch, "m", "n")


def _matmul(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a product of two matrices, or of two batches of matrices."""
    operands(2, inputs)
    same_dtype(inputs)
    a, b = inputs
    if a.rank < 2 or b.rank not in (2, a.rank):
        raise RuleError(
            f"a matrix or equally batched matrices are needed, got shapes {a.shape} and {b.shape}"
        )
    labels_a, labels_b, out = _labels(inputs, attributes)
    # Equal labels must have equal sizes.
    size = dict(zip(labels_a, a.shape, strict=True))
    for label, n in zip(labels_b, b.shape, strict=True):
        if size.setdefault(label, n) != n:
            raise RuleError(
                f"shapes {a.shape} and {b.shape} cannot be multiplied: {size[label]} differs from {n}"
            )
    return (a.with_shape([size[label] for label in out]),)


def _matmul_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Write the gradients of both operands."""
    x, w = instruction.inputs
    transpose_a = bool(instruction.attribute("transpose_a"))
    transpose_b = bool(instruction.attribute("transpose_b"))
    # For y = x w: dx = dy w^T and dw = x^T dy, with transposed operands in place of transposed
    # results.
    if transpose_a:
        dx = emitter.op("matmul", w, dy, transpose_a=transpose_b, transpose_b=True)
    else:
        dx = emitter.op("matmul", dy, w, transpose_b=not transpose_b)
    # A weight shared by a batch sums its gradient over all leading axes as well; frameworks run
    # that as one GEMM over flattened rows, hence an op of its own.
    if emitter.types[w].rank == 2 and emitter.types[x].rank > 2:
        if transpose_a:
            raise RuleError(
                "the gradient of a transposed batched operand times a matrix is not supported"
            )
        operands_of_dw = (dy, x) if transpose_b else (x, dy)
        dw = emitter.op("matmul_weight_grad", *operands_of_dw)
    elif transpose_b:
        dw = emitter.op("matmul", dy, x, transpose_a=True, transpose_b=transpose_a)
    else:
        dw = emitter.op("matmul", x, dy, transpose_a=not transpose_a)
    return dx, dw


def _weight_grad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a product's gradient with respect to its right operand, summed over rows."""
    operands(2, inputs)
    same_dtype(inputs)
    x, dy = inputs
    if x.rank < 2 or x.shape[:-1] != dy.shape[:-1]:
        raise RuleError(
            f"operands must agree in all axes but the last, got shapes {x.shape} and {dy.shape}"
        )
    return (x.with_shape([x.shape[-1], dy.shape[-1]]),)


def shard_labels(query: ShardingQuery, labels: tuple[Labels, Labels, Labels]) -> ShardingDecision:
    """Spread a product along one label.

    If the operands are sharded along different labels, a label of the output is preferred to one
    that is summed over, and a label of the second operand (the weight) to one of the first, so that
    activations are gathered, not weights.
    """
    labels_a, labels_b, out = labels
    choices = []
    for index, names in enumerate((labels_a, labels_b)):
        axis = query.sharded_axis(index)
        if axis is not None:
            choices.append((names[axis] in out, index, names[axis]))
    if not choices:
        return query.replicated()
    # Tuples compare by (in the result, second operand): `max` picks the preferred choice.
    label = max(choices)[2]

    def along(names: Labels) -> Sharding:
        return Sharded(names.index(label)) if label in names else REPLICATED

    # A sharded axis that is summed over leaves partial sums.
    result = along(out) if label in out else Partial("sum")
    return ShardingDecision((along(labels_a), along(labels_b)), (result,))


def _shard_matmul(query: ShardingQuery) -> ShardingDecision:
    return shard_labels(query, _labels(query.operands, query.attributes))


def _shard_weight_grad(query: ShardingQuery) -> ShardingDecision:
    lead = tuple(map(str, range(query.operands[0].rank - 1)))
    return shard_labels(query, ((*lead, "m"), (*lead, "n"), ("m", "n")))


def _matmul_work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
    """Work rule of a product: one GEMM, batched if both operands are."""
    a, b = inputs
    # A batch times one matrix is a single GEMM over all rows; equally batched matrices are a
    # batched one. The pass selects the layout of operands: a transposed weight is what input
    # gradients multiply with.
    m, n = outputs[0].shape[-2:]
    k = a.shape[-2] if attributes.get("transpose_a") else a.shape[-1]
    batch = prod(a.shape[:-2])
    dtype = kernel_dtype(a)
    if b.rank == 2:
        return (
            Gemm(
                dtype=dtype,
                m=m * batch,
                n=n,
                k=k,
                pass_="dgrad" if attributes.get("transpose_b") else "fwd",
            ),
        )
    return (Gemm(op="bmm", dtype=dtype, batch=batch, m=m, n=n, k=k),)


def _weight_grad_work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
    m, n = outputs[0].shape
    return (
        Gemm(dtype=kernel_dtype(inputs[0]), m=m, n=n, k=prod(inputs[0].shape[:-1]), pass_="wgrad"),
    )


MATMUL = table(
    OpDefinition(
        name="matmul",
        infer=_matmul,
        work=_matmul_work,
        gradient=_matmul_gradient,
        shard=_shard_matmul,
    ),
    OpDefinition(
        name="matmul_weight_grad",
        infer=_weight_grad,
        work=_weight_grad_work,
        shard=_shard_weight_grad,
    ),
)
