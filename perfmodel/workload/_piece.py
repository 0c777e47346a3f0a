"""Pieces: sub-layers with forward and backward work, assembled into blocks.

Every piece saves for backward exactly the inputs that its own gradients need, the rule by which
Korthikanti et al. (arXiv 2205.05198, section 4.1) count activation memory.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound, OptimizerStep
from perfmodel.spec import OPTIMIZERS, Job, RecomputeModule
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import ActivationBytes, BlockOps, Comm, Kernels
from perfmodel.workload._local import Precision, storage_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedWork:
    """Forward work that is repeated if a module is recomputed, and the saved bytes."""

    module: RecomputeModule
    forward: tuple[KernelOp, ...]
    forward_comm: tuple[Comm, ...]
    freed_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One sub-layer. Kernels of each tuple are in order of execution."""

    forward: tuple[KernelOp, ...] = ()
    backward_input: tuple[KernelOp, ...] = ()
    backward_weight: tuple[KernelOp, ...] = ()
    forward_comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    recomputed_work: tuple[RecomputedWork, ...] = ()
    """Work of the piece that selective recompute repeats, by module."""
    params: int = 0
    """Parameters that this device holds of the piece."""
    expert_params: int = 0
    """The part of `params` in routed experts."""
    saved_bytes: float = 0.0
    """Bytes that the piece saves for its backward."""
    input_bytes: float = 0.0
    """The part of `saved_bytes` that the previous piece produced."""
    reads_result: bool = False
    """Whether its gradients need the result of the preceding product, so that recompute must
    include that."""
    inner_forward: tuple[KernelOp, ...] = ()
    """Kernels before its last product whose results its backward needs."""


_PARTS_OF_MODULES: Final[Mapping[RecomputeModule, frozenset[RecomputeModule]]] = {
    "moe": frozenset({"moe_act", "shared_experts"}),
    "mlp": frozenset({"mlp_act"}),
}
"""Modules that are part of others, and therefore recomputed with these."""


SECOND_PRODUCTS: Final[RecomputeModule] = "second_products"
"""The module of torch's selective checkpoints of operators."""
_KEPT_COLLECTIVES: Final = ("reduce_scatter", "all_to_all")
"""Collectives whose results torch's selective checkpoints save."""


def recomputed(
    module: RecomputeModule, pieces: Sequence[Piece], frees: Sequence[float] | None = None
) -> list[Piece]:
    """Mark pieces as recomputed if `module` is.

    They then keep nothing but the input of the first, or free `frees` bytes each.
    """
    # The input of the first stays, as the repeated forward begins with it.
    if not frees:
        frees = [piece.saved_bytes for piece in pieces]
        frees[0] -= pieces[0].input_bytes
    marked = []
    for piece, freed_bytes in zip(pieces, frees, strict=True):
        work = RecomputedWork(
            module=module,
            forward=piece.forward,
            forward_comm=piece.forward_comm,
            freed_bytes=freed_bytes,
        )
        marked.append(replace(piece, recomputed_work=(*piece.recomputed_work, work)))
    return marked


def joined(first: Piece, second: Piece) -> Piece:
    """Join two pieces with separate inputs; the backward pass runs the second first."""
    return Piece(
        forward=first.forward + second.forward,
        backward_input=second.backward_input + first.backward_input,
        backward_weight=second.backward_weight + first.backward_weight,
        forward_comm=first.forward_comm + second.forward_comm,
        backward_comm=second.backward_comm + first.backward_comm,
        recomputed_work=first.recomputed_work + second.recomputed_work,
        params=first.params + second.params,
        expert_params=first.expert_params + second.expert_params,
        saved_bytes=first.saved_bytes + second.saved_bytes,
        input_bytes=first.input_bytes + second.input_bytes,
        reads_result=first.reads_result or second.reads_result,
        inner_forward=first.inner_forward + second.inner_forward,
    )


def assemble(
    name: str,
    pieces: Sequence[Piece],
    *,
    train: bool,
    is_layer: bool = True,
    input_bytes: float | None = None,
    workspace_bytes: float,
    boundary_bytes: float = 0.0,
    boundary_comm: tuple[Comm, ...] = (),
    tied_params: int = 0,
    stops_recompute: bool = False,
    modules: tuple[RecomputeModule, ...] = (),
) -> BlockOps:
    """Assemble pieces in forward order into a block; the backward pass runs them in reverse.

    Args:
        name: name as shown to people.
        pieces: parts of the block in forward order.
        train: False leaves out everything but the forward pass.
        is_layer: see `BlockOps`.
        input_bytes: bytes that full recompute keeps; `None` for blocks outside recomputation
            (embedding, head), which save the same under every mode.
        workspace_bytes, boundary_bytes, boundary_comm, tied_params: see `BlockOps`.
        stops_recompute: full recompute leaves out the last product and what follows it
            (`Job.stops_recompute`).
        modules: modules that selective recompute repeats.
    """
    # Backward retraces the pieces; in inference there is none.
    backwards = list(reversed(pieces)) if train else []

    selective = _selective_work(pieces, modules, input_bytes) if train else []

    # Full recompute: the whole forward again, from the block's input on.
    recomputes = train and input_bytes is not None
    repeated: Sequence[Piece] = pieces if recomputes else ()
    if stops_recompute:
        repeated = _until_last_needed(repeated)

    # Activations: all of them, less what selective recompute frees, or the input alone.
    saved_bytes = sum(piece.saved_bytes for piece in pieces) if train else 0.0
    return BlockOps(
        name=name,
        is_layer=is_layer,
        forward=_kernels(piece.forward for piece in pieces),
        backward_input=_kernels(piece.backward_input for piece in backwards),
        backward_weight=_kernels(piece.backward_weight for piece in backwards),
        recompute_selective=_kernels(work.forward for work in selective),
        recompute_full=_kernels(piece.forward for piece in repeated),
        forward_comm=_comms(piece.forward_comm for piece in pieces),
        backward_comm=_comms(piece.backward_comm for piece in backwards),
        recompute_selective_comm=_comms(work.forward_comm for work in selective),
        recompute_full_comm=_comms(piece.forward_comm for piece in repeated),
        params=sum(piece.params for piece in pieces),
        expert_params=sum(piece.expert_params for piece in pieces),
        tied_params=tied_params,
        activation_bytes=ActivationBytes(
            none=saved_bytes,
            selective=saved_bytes - sum(work.freed_bytes for work in selective),
            full=input_bytes if train and input_bytes is not None else saved_bytes,
        ),
        workspace_bytes=workspace_bytes,
        boundary_bytes=boundary_bytes,
        boundary_comm=boundary_comm,
    )


def _selective_work(
    pieces: Sequence[Piece], modules: tuple[RecomputeModule, ...], input_bytes: float | None
) -> list[RecomputedWork]:
    """The work of a block that selective recompute of some modules repeats (`assemble`)."""
    if SECOND_PRODUCTS in modules and input_bytes is not None:
        return _second_products(pieces, input_bytes)

    # A module that is part of another chosen one is repeated with that.
    chosen = set(modules)
    for module, parts in _PARTS_OF_MODULES.items():
        if module in modules:
            chosen -= parts
    selective: list[RecomputedWork] = []
    for piece in pieces:
        selective += [work for work in piece.recomputed_work if work.module in chosen]
    return selective


def _second_products(pieces: Sequence[Piece], input_bytes: float) -> list[RecomputedWork]:
    """Work that the backward pass repeats if a layer keeps only its input, every second product and
    the result of attention.

    torch's selective checkpoint of operators counts products in their order, of which our pieces
    join some (queries, keys and values; gate and value). So half of each product is kept and the
    other half repeated (torchtitan parallelize_llama.py, `_op_sac_save_list` and
    `_get_custom_policy`). Results of reduce-scatters and all-to-alls are kept too; products of
    experts are not on the list.
    """
    works: list[RecomputedWork] = []
    kept_bytes = input_bytes
    for piece in pieces:
        repeated: list[KernelOp] = []
        attention_bytes = 0.0
        result_is_kept = any(comm.collective in _KEPT_COLLECTIVES for comm in piece.forward_comm)
        for op in piece.forward:
            if isinstance(op, Attention):
                # A ring attends block by block, but adds its parts up in one result.
                elements = op.batch * op.seq_q * op.heads * (op.head_dim_v or op.head_dim)
                attention_bytes = max(attention_bytes, float(elements * _result_bytes(op)))
            elif isinstance(op, Gemm) and op.op == "linear" and op.batch == 1:
                repeated.append(replace(op, n=max(1, op.n // 2)))
                kept_bytes += op.m * op.n * _result_bytes(op) / 2
            # A copy that nothing reads but a collective whose result is kept (`scatter_copy`) is
            # not made again.
            elif not (result_is_kept and _is_copy(op)):
                repeated.append(op)
        kept_bytes += attention_bytes
        kept_bytes += sum(
            comm.bytes * comm.count
            for comm in piece.forward_comm
            if comm.collective == "all_to_all"
        )
        work = RecomputedWork(
            module=SECOND_PRODUCTS,
            forward=tuple(repeated),
            forward_comm=tuple(
                comm for comm in piece.forward_comm if comm.collective not in _KEPT_COLLECTIVES
            ),
            freed_bytes=piece.saved_bytes,
        )
        works.append(work)

    # Tensors that are kept reduce the memory that the first piece would free.
    works[0] = replace(works[0], freed_bytes=works[0].freed_bytes - kept_bytes)
    return works


def _is_copy(op: KernelOp) -> bool:
    """Whether a kernel only moves a tensor."""
    return isinstance(op, MemoryBound) and (op.op, op.n_inputs) == ("add", 1)


def _result_bytes(op: KernelOp) -> int:
    """Bytes of an element of a kernel's result, which has 16 bits if the operands have fewer."""
    return dtype_bytes(storage_dtype(op.dtype))


def _until_last_needed(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Forward work up to the last result that the backward needs."""
    # Backward does not need the output of a layer's last product, because its gradients follow from
    # its input. The exceptions are outputs that a later piece reads in backward: a norm of it, or a
    # router's weights, whose gradient follows from the results of the experts.
    products = []
    for place, piece in enumerate(pieces):
        if any(op.is_matmul for op in piece.forward):
            products.append(place)
    if not products:
        return pieces
    last = products[-1]
    readers = [place for place in range(last + 1, len(pieces)) if pieces[place].reads_result]
    if readers:
        reader = pieces[readers[-1]]
        return [*pieces[: readers[-1]], replace(reader, forward=reader.forward[:-1])]
    return [*pieces[:last], Piece(forward=pieces[last].inner_forward)]


def memory(
    precision: Precision,
    op: str,
    rows: int,
    hidden: int,
    n_inputs: int = 1,
    *,
    backward: bool = False,
    dtype: str | None = None,
) -> MemoryBound:
    """An element-wise or row-wise kernel on stored activations (or on `dtype`)."""
    return MemoryBound(
        op=op,
        dtype=dtype or precision.act_dtype,
        rows=rows,
        hidden=hidden,
        n_inputs=n_inputs,
        pass_="bwd" if backward else "fwd",
    )


def moving(precision: Precision, rows: int, width: int, bytes_per_element: float) -> MemoryBound:
    """A kernel that moves so many bytes for every element of a tensor, as one that only reads it.

    It takes as long as a copy of that share of the tensor which reads and writes as many bytes.
    """
    share = bytes_per_element / (2 * precision.act_bytes)
    return memory(precision, "add", rows, max(1, round(width * share)))


def pointwise(
    precision: Precision,
    ops: Sequence[tuple[str, int]],
    rows: int,
    hidden: int,
    *,
    params: int = 0,
    saved_bytes: float = 0.0,
) -> Piece:
    """Element-wise kernels `(name, inputs)` over one tensor, each with one backward kernel."""
    forward = [memory(precision, op, rows, hidden, n_inputs) for op, n_inputs in ops]
    backward = [
        memory(precision, op, rows, hidden, n_inputs, backward=True)
        for op, n_inputs in reversed(ops)
    ]
    return Piece(
        forward=tuple(forward),
        backward_input=tuple(backward),
        params=params,
        saved_bytes=saved_bytes,
    )


def between_casts(
    precision: Precision, rows: int, width: int, pieces: Sequence[Piece]
) -> list[Piece]:
    """Pieces in fp32 between a cast of their 16-bit input and one of their result.

    PyTorch aten/src/ATen/autocast_mode.h: `layer_norm` and `group_norm` are among the operators
    that torch.autocast runs in fp32. A cast between 16 and 32 bits moves the 6 bytes of a 16-bit
    sum. The pieces themselves keep what they are given.
    """
    cast = memory(precision, "add", rows, width, 2)
    casts = Piece(forward=(cast,), backward_input=(cast,))
    return [casts, *pieces, casts]


def accumulated(block: BlockOps, precision: Precision, hidden: int, tensors: int) -> BlockOps:
    """Add kernels that accumulate 16-bit gradients into fp32 ones, one per weight."""
    # A weight is read in 16 bits and read and written in 32, 10 of the 12 bytes of an fp32
    # addition.
    params = block.params + block.tied_params
    rows = round(params * 10 / 12 / hidden / tensors)
    if not rows:
        return block
    add = memory(precision, "add", rows, hidden, 2, dtype="fp32")
    return replace(block, backward_weight=(*block.backward_weight, (add, tensors)))


def _kernels(parts: Iterable[tuple[KernelOp, ...]]) -> Kernels:
    """Kernels of all parts in order, with consecutive equal ones counted."""
    counted: list[tuple[KernelOp, int]] = []
    for op in chain.from_iterable(parts):
        if counted and counted[-1][0] == op:
            counted[-1] = (op, counted[-1][1] + 1)
        else:
            counted.append((op, 1))
    return tuple(counted)


def _comms(parts: Iterable[tuple[Comm, ...]]) -> tuple[Comm, ...]:
    """Collectives of all parts in order."""
    return tuple(chain.from_iterable(parts))


# --- updates of weights
# --------------------------------------------------------------------------------


CLIPPING_PASSES = 3
"""Passes over the gradient for clipping: it is read for the norm, then read and written to clip
it."""
UNSCALING_PASSES = 2
"""Passes over the gradient for unscaling: it is read and written to remove the loss scale."""
WIDEN_BYTES = 6
"""Bytes per parameter: an fp16 gradient copied to fp32."""
AVERAGE_BYTES = 4 + 8
"""Bytes per parameter: the weight read; its average read and written."""


def optimizer_op(n_params_local: int, job: Job) -> OptimizerStep:
    """The update of the parameters whose states this device holds, by one kernel.

    The traffic per parameter is that of mixed-precision Adam with fp32 states, or of another
    optimizer as `OPTIMIZERS` has it.

    Args:
        n_params_local: parameters updated here (already divided by the sharding degree).
    """
    # States and master weight are read and written, the weight in the compute type is written. In
    # fp32 training weight and master are one; without a master copy the weight itself is read and
    # written.
    weight = storage_dtype(job.dtype)
    kind = OPTIMIZERS[job.optimizer]
    reduced_bytes = dtype_bytes(job.gradients.grad_dtype)
    if kind.master:
        updated = 2 * (4 + kind.state_bytes) + (0 if weight == "fp32" else dtype_bytes(weight))
    else:
        # Gradients have the type of such weights by now, whatever they were reduced in (PyTorch
        # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`: converted to
        # `orig_dtype`).
        reduced_bytes = min(reduced_bytes, dtype_bytes(weight))
        updated = 2 * (dtype_bytes(weight) + kind.state_bytes)
    traffic = kind.gradient_reads * reduced_bytes + updated + kind.further_bytes
    if job.weight_average:
        traffic += AVERAGE_BYTES

    # Before the update gradients are clipped, and fp16 ones rid of the loss scale: Megatron-LM,
    # DeepSpeed and FSDP do each in a pass of its own, on fp32 gradients where there are fp32
    # weights.
    if weight != "fp32" and kind.clips:
        clipped_bytes = 4 if kind.master else reduced_bytes
        traffic += CLIPPING_PASSES * clipped_bytes
        if weight == "fp16":
            traffic += UNSCALING_PASSES * clipped_bytes + (WIDEN_BYTES if kind.master else 0)
    return OptimizerStep(op=kind.kernel, n_params=n_params_local, bytes_per_param=float(traffic))


def orthogonalisation(block: BlockOps, job: Job, *, experts: bool) -> Counter[KernelOp]:
    """The bf16 products by which Muon orthogonalises the updates of a layer's matrices.

    The matrices are those of the layer's routed experts, or those outside them. Tensor-parallel
    ranks do so with their own shards (the block-wise mode of Megatron-Core's Muon).
    """
    products: Counter[KernelOp] = Counter()
    steps = OPTIMIZERS[job.optimizer].newton_schulz
    if not steps or not block.is_layer:
        return products

    # For a matrix X with a rows and b >= a columns, a Newton-Schulz iteration is A = X X', A A, and
    # (b A + c A A) X, 2 a^2 b + 2 a^3 + 2 a^2 b FLOPs.
    for shape, count in block.weight_shapes(experts=experts).items():
        a, b = sorted(shape)
        for n, k in ((a, b), (a, a), (b, a)):
            products[Gemm(dtype="bf16", m=a, n=n, k=k)] += steps * count
    return products
