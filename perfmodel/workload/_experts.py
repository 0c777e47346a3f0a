"""The mixture-of-experts part of a layer, on the rank with the busiest experts."""

from dataclasses import replace

from perfmodel.ops import Gemm, KernelOp, MoE
from perfmodel.spec import Job, Model, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.units import dtype_bytes
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._local import Precision, ShardSizes
from perfmodel.workload._piece import Piece, RecomputedWork, memory, pointwise, recomputed
from perfmodel.workload._pointwise import activation, gate, norm
from perfmodel.workload._quantisation import quantised_each, widened
from perfmodel.workload._routing import Routing, combine, dispatch, route


def expert_feed_forward(
    model: Transformer, local: ShardSizes, experts: Experts, *, own_input: bool = True
) -> list[Piece]:
    """Router, dispatch, routed experts, combine, shared experts.

    Args:
        own_input: False where the input is kept already, by attention beside the experts.

    Raises:
        LayoutError: if experts or their sizes do not divide, or tensor parallelism is combined with
            expert parallelism, or with an `etp` of its own, without sequence parallelism (which
            would send every token tp times).
    """
    # The router is never quantised. It keeps its fp32 probabilities.
    routing = route(model, local, experts)
    router = replace(local.precision, dtype=local.precision.wide_dtype)
    latent = local.for_module("latent").precision
    rows = routing.rows

    # Experts may work on a smaller latent size, to which tokens are brought before they are sent.
    to_latent = [linear(latent, rows, experts.latent, local.hidden)] if experts.latent else []
    from_latent = [linear(latent, rows, local.hidden, experts.latent)] if experts.latent else []

    # Branches may have norms of their own: before the router, at both ends of routed experts,
    # behind the shared one.
    branch_norm = [norm(model, local)] if experts.branch_norms else []
    pieces = [
        *branch_norm,
        linear(
            router,
            rows,
            experts.count + experts.idle,
            local.hidden,
            bias=experts.count + experts.idle if experts.router_bias else 0,
            kept_input=1.0 if own_input else 0.0,
        ),
        pointwise(
            router,
            [("softmax", 1)],
            rows,
            experts.count + experts.idle,
            params=experts.count if experts.branch_norms else 0,
            saved_bytes=4.0 * rows * (experts.count + experts.idle),
        ),
        *branch_norm,
        *to_latent,
        dispatch(local, routing),
        _experts(model, local, experts, routing),
        combine(local, routing),
        *from_latent,
        *branch_norm,
    ]

    if experts.shared_ffn_hidden // local.tp:
        shared = [*_shared_experts(model, local, experts), *branch_norm]
        if experts.shared_gate:
            shared.append(_shared_gate(local, router, rows))
        pieces += recomputed("shared_experts", shared)
    return recomputed("moe", pieces)


def _shared_experts(model: Transformer, local: ShardSizes, experts: Experts) -> list[Piece]:
    """A feed-forward of all tokens, on the router's input, which is kept already."""
    inner = experts.shared_ffn_hidden // local.tp
    return [
        column_linear(
            local,
            inner * model.inner_projections,
            local.hidden,
            bias=model.block.bias,
            kept_input=False,
        ),
        activation(model, local, local.tokens, inner),
        row_linear(local, local.hidden, inner, bias=model.block.bias),
    ]


def _shared_gate(local: ShardSizes, router: Precision, rows: int) -> Piece:
    """The gate of shared experts: its product has one column, which makes it element-wise work."""
    return pointwise(
        router, gate(local), rows, local.hidden, params=local.hidden, saved_bytes=local.norm_bytes
    )


def _experts(model: Transformer, local: ShardSizes, experts: Experts, routing: Routing) -> Piece:
    """Routed experts: one fused kernel (`Routing.fused`), or grouped products.

    Grouped gradient products carry the shape of their forward product, as measured tables do.
    Keeps the dispatched tokens, and input and output of the activation.
    """
    hidden, inner = routing.hidden, routing.inner
    dtype = local.precision.dtype
    wide = inner * model.inner_projections

    # Two grouped products around an activation. In 8 bits the kernel of the products may include
    # the activation between them and the casts of their results.
    first = _grouped_product(local, routing, wide, hidden)
    second = _grouped_product(local, routing, hidden, inner)
    between = activation(model, local, routing.processed, inner)
    one_kernel = fuses_experts(model, local.job, dtype, local.precision.recipe)
    separate_forward = () if one_kernel else between.forward
    separate_backward = () if one_kernel else between.backward_input
    forward: tuple[KernelOp, ...] = (first, *separate_forward, second)
    if routing.fused:
        forward = (_fused_experts(local, experts, routing),)

    # Kernels around the products: casts of operands, weights that are stored narrow, output biases.
    further_widths = ((), ()) if one_kernel else ((inner,), (wide,))
    casts, gradient_casts = (
        quantised_each(local.precision, routing.processed, (hidden, *widths))
        for widths in further_widths
    )
    widenings = widened(local.precision, routing.local_experts * (wide + inner), hidden)
    inner_forward = () if routing.fused else (*widenings, *casts, first, *separate_forward)
    bias_kernels, bias_gradients = _output_bias(model, local, routing)
    accumulate = local.precision.accumulate

    biases = wide + hidden if model.block.bias else 0
    params = routing.local_experts * (hidden * (wide + inner) + biases)

    # A recomputed activation gives up its result and what it keeps beyond the first product's
    # output.
    column_bytes = float(routing.processed) * dtype_bytes(dtype)
    beyond_bytes = max(0.0, between.saved_bytes - wide * routing.processed * local.act_bytes)
    freed_bytes = inner * column_bytes + beyond_bytes
    act = RecomputedWork(
        module="moe_act", forward=between.forward, forward_comm=(), freed_bytes=freed_bytes
    )
    return Piece(
        recomputed_work=(act,),
        forward=(*widenings, *casts, *forward, *bias_kernels),
        backward_input=(
            *bias_gradients,
            *widenings,
            *gradient_casts,
            replace(second, pass_="dgrad"),
            *separate_backward,
            replace(first, pass_="dgrad"),
        ),
        backward_weight=(
            replace(second, pass_="wgrad", accumulate=accumulate),
            replace(first, pass_="wgrad", accumulate=accumulate),
        ),
        params=params,
        expert_params=params,
        saved_bytes=(hidden + inner) * column_bytes + between.saved_bytes,
        inner_forward=inner_forward,
    )


def _grouped_product(local: ShardSizes, routing: Routing, n: int, k: int) -> Gemm:
    """A product of every active expert, with weights of [k, n] each."""
    return Gemm(
        op="grouped_linear",
        dtype=local.precision.dtype,
        groups=routing.active_experts,
        m=routing.rows_per_expert,
        n=n,
        k=k,
    )


def _fused_experts(local: ShardSizes, experts: Experts, routing: Routing) -> MoE:
    """The kernel that copies tokens, runs the experts and adds up their results
    (`Routing.fused`)."""
    shard = local.shard
    return MoE(
        op="moe_ffn",
        dtype=local.precision.dtype,
        tokens=max(1, routing.processed * shard.ep // experts.topk),
        hidden=routing.hidden,
        inter=experts.ffn_hidden,
        topk=experts.topk,
        experts=experts.count,
        moe_tp=shard.expert_tp,
        moe_ep=shard.ep,
    )


def fuses_experts(model: Model, job: Job, dtype: str, recipe: str) -> bool:
    """Whether one kernel runs the product of all experts together with the following one
    (`ExpertTokens.fused_experts`).

    Args:
        dtype, recipe: types of the products.
    """
    narrow = dtype == "fp8" and recipe == "mxfp8"
    has_bias = isinstance(model, Transformer) and model.block.bias
    return job.experts.fused_experts and narrow and not has_bias


def _output_bias(
    model: Transformer, local: ShardSizes, routing: Routing
) -> tuple[tuple[KernelOp, ...], tuple[KernelOp, ...]]:
    """Kernels that add the experts' output biases, forward and backward, in training.

    Megatron-Core megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias.
    """
    if not model.block.bias or routing.fused or local.job.mode == "inference":
        return (), ()

    # A number of equal passes over the experts' outputs.
    def passes(count: int, inputs: int, dtype: str, backward: bool) -> list[KernelOp]:
        kernel = memory(
            local.precision,
            "add",
            routing.processed,
            routing.hidden,
            inputs,
            backward=backward,
            dtype=dtype,
        )
        return [kernel] * count

    # Each bias is weighed by the router's fp32 weights, added expert by expert, and the results are
    # joined and brought back to 16 bits.
    narrow = local.precision.act_dtype
    forward = [
        *passes(2, 1, "fp32", backward=False),
        *passes(1, 2, "fp32", backward=False),
        *passes(1, 1, narrow, backward=False),
    ]

    # Gradients of bias and weights are sums of products that are written out.
    backward = [
        *passes(2, 1, narrow, backward=True),
        *passes(3, 1, "fp32", backward=True),
    ]
    return tuple(forward), tuple(backward)
