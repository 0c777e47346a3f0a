"""Element-wise work on the scores of attention that is not fused: scale, mask, softmax and
dropout."""

from dataclasses import replace

from perfmodel.spec import Transformer
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, joined, memory, moving, pointwise


def compiled_softmax(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Scale, mask, softmax and dropout of scores in the kernels of a compiler
    (`KernelChoices.row_kernels`).

    One kernel reads the scores and writes their softmax, and with dropout also its mask of one byte
    and its result; backward reads the softmax, its gradient and the mask, and writes the gradient
    of scores. A compiler that ends its kernels at reductions reads the scores for their maximum and
    for the sum of their exponentials before, and in backward everything once more for the sum of
    products. The kernels stream their tensors as element-wise ones do: the tables'
    `scale_mask_softmax` was written for 16 bits, and takes several times as long in 32.
    """
    element = local.act_bytes
    by_reduction = local.job.kernels.row_kernels == "by_reduction"
    forward_bytes, backward_bytes = 2 * element, 3 * element
    if by_reduction:
        forward_bytes += 2 * element
        backward_bytes += 2 * element
    if model.block.dropout:
        forward_bytes += element + 1
        backward_bytes += 1 + by_reduction
    return Piece(
        forward=(moving(local.precision, rows, keys, forward_bytes),),
        backward_input=(moving(local.precision, rows, keys, backward_bytes),),
    )


def softmax_in_fp32(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Mask and softmax of 16-bit scores in fp32, between a cast each way.

    The product before has the scale (Fast-LLM layers/attention/attention.py `_attn_backup`).
    """
    # A cast between 16 and 32 bits moves the 6 bytes of a 16-bit sum.
    precision = local.precision
    cast = memory(precision, "add", rows, keys, 2)
    wide = replace(precision, act_dtype="fp32", act_bytes=4)
    names = ["masked_fill", "softmax"] if model.attention.causal else ["add", "softmax"]
    in_fp32 = pointwise(wide, [(name, 1) for name in names], rows, keys)
    return replace(
        in_fp32,
        forward=(cast, *in_fp32.forward, cast),
        backward_input=(cast, *in_fp32.backward_input, cast),
    )


def without_softmax(between: Piece) -> Piece:
    """Operations on scores after their softmax, such as dropout."""
    return replace(between, forward=between.forward[1:], backward_input=between.backward_input[:-1])


def scaled_and_masked(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Operations of unfused attention on scores before their softmax: a scale and a mask.

    Decoders fill what lies ahead, and their backward fills the gradient at the same places
    (Megatron-LM `attention_mask_func`; Hugging Face GPT-2, `torch.where`). Encoders of text add a
    mask of one row per sequence, whose gradient nobody needs, so that the scores' own passes
    through unchanged (google-research/bert modeling.py `attention_layer`, and its ports). T5 adds
    its relative positions instead, unscaled, and sums their gradient over the batch (Hugging Face
    T5, `position_bias`). Patches are never masked: images have no padding.
    """
    precision = local.precision
    scale = pointwise(precision, [("mul_scalar", 1)], rows, keys)
    if model.inputs.patches:
        return scale
    if model.attention.causal and model.inputs.positions != "relative":
        return joined(scale, pointwise(precision, [("masked_fill", 1)], rows, keys))
    added = Piece(forward=(memory(precision, "add", rows, keys),))
    if model.inputs.positions == "relative":
        return replace(added, backward_input=(memory(precision, "add", rows, keys),))
    return joined(scale, added)
