"""Kernels bound by memory: element-wise and row-wise ones, embeddings, optimizer steps."""

from typing import Any, Final

from perfmodel.learn._machine import Machine
from perfmodel.learn._work import Columns, Physics, cached_share, divides, flag, log2

_OPS_PER_ELEMENT: Final = 4.0
"""Operations that an element costs the vector lanes: addresses, load, conversion, arithmetic, store."""
_MANY_UNITS: Final = 8
"""Multiprocessors from which elements are issued one per lane; few wide cores (TPU) handle whole vectors."""


def memory(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Element-wise and row-wise kernels: (inputs + 1 output) x elements; `bwd` reads one more."""
    rows, hidden = x["rows"], x["hidden"]
    elements = rows * hidden
    traffic = elements * (x["n_inputs"] + 1.0 + x["bwd"]) * x["element_bytes"]
    blocks = elements / (machine.units * 4096.0)
    per_unit = rows / machine.units
    resident = traffic / machine.l2
    features = [
        log2(xp, rows), log2(xp, hidden), log2(xp, elements), x["n_inputs"], log2(xp, resident),
        log2(xp, blocks), blocks / xp.ceil(blocks), log2(xp, per_unit), per_unit / xp.ceil(per_unit),
        log2(xp, hidden * x["element_bytes"]),
    ]  # fmt: skip
    features += [divides(xp, hidden, d) for d in (2, 4, 8, 128, 1024)]
    features += [divides(xp, elements, d) for d in (4, 512)]
    # fused softmax kernels (Megatron) want batch x heads = rows / hidden to be a multiple of four
    features += [divides(xp, rows, 4), flag(xp, xp.mod(rows, 4 * hidden) == 0), flag(xp, hidden > 2048)]
    axes = [log2(xp, v) for v in (rows, hidden, resident)]
    vector = xp.where(machine.units >= _MANY_UNITS, _OPS_PER_ELEMENT * elements, 0.0)
    return Physics(elements, elements, traffic, features, axes, vector, cached_share(traffic, machine))


def embedding(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Rows gathered and written; `bwd` reads, adds and writes them."""
    tokens, hidden, vocab = x["tokens"], x["hidden"], x["vocab"]
    moved = tokens * hidden * x["element_bytes"]
    table = vocab * hidden * x["element_bytes"]
    features = [
        log2(xp, tokens), log2(xp, hidden), log2(xp, vocab), log2(xp, moved / machine.l2),
        log2(xp, table / machine.l2), log2(xp, tokens / vocab), log2(xp, table / moved),
        divides(xp, hidden, 128), divides(xp, hidden, 1024),
    ]  # fmt: skip
    axes = [log2(xp, v) for v in (tokens, hidden, vocab)]
    return Physics(tokens * hidden, tokens * hidden, moved * (2.0 + x["bwd"]), features, axes)


def optimizer(xp: Any, x: Columns, machine: Machine) -> Physics:
    """One update of all local parameters, 12 FLOPs each for Adam."""
    count, tensors = x["n_params"], x["tensors"]
    traffic = count * x["bytes_per_param"]
    features = [log2(xp, count), log2(xp, tensors), log2(xp, count / tensors), log2(xp, traffic / machine.l2)]
    return Physics(12.0 * count, 12.0 * count, traffic, features, [log2(xp, count), log2(xp, tensors)])
