"""What ONNX's operators are, and what they cost per output element (same convention as for JAX)."""

from typing import Final

VIEWS: Final = frozenset({
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand", "Slice", "Split", "Dropout",
    "DepthToSpace", "SpaceToDepth", "OptionalGetElement",
})  # fmt: skip
"""Read in place by what uses them (dropout does nothing in inference)."""
CONSTANTS: Final = frozenset({"Constant", "ConstantOfShape", "Shape", "Size", "Range", "EyeLike"})
POINTWISE: Final[dict[str, int]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Neg", "Abs", "Sign", "Floor", "Ceil", "Round",
                     "Where", "Cast", "CastLike", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And",
                     "Or", "Xor", "Not", "IsNaN", "IsInf", "BitShift", "Relu", "Sum", "Mean"), 1),
    **dict.fromkeys(("Exp", "Log", "Sqrt", "Pow", "Tanh", "Sin", "Cos", "Erf", "Sigmoid", "Reciprocal", "Softplus",
                     "Concat", "Pad", "Tile", "Trilu"), 0),
    "Clip": 2, "LeakyRelu": 3, "PRelu": 3, "Elu": 3, "HardSigmoid": 4, "HardSwish": 5, "Mish": 1, "Swish": 1,
    "Gelu": 3, "BatchNormalization": 4, "QuantizeLinear": 3, "DequantizeLinear": 2,
}  # fmt: skip
"""FLOPs per output element; batch normalisation at inference is a scale and a shift of known statistics."""
REDUCTIONS: Final = frozenset({
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSumExp", "ArgMax", "ArgMin",
})  # fmt: skip
ROW_WISE: Final[dict[str, tuple[str, float]]] = {
    "Softmax": ("softmax", 4), "LogSoftmax": ("softmax", 4), "LayerNormalization": ("layer_norm", 7),
    "RMSNormalization": ("rms_norm", 4), "SkipLayerNormalization": ("layer_norm", 8),
    "GroupNormalization": ("layer_norm", 7), "InstanceNormalization": ("layer_norm", 7),
    "RotaryEmbedding": ("rope", 3), "CumSum": ("cumsum", 1), "TopK": ("top_k", 0), "Resize": ("copy", 4),
    "GatherElements": ("copy", 0), "GatherND": ("copy", 0), "ScatterND": ("copy", 0), "ScatterElements": ("copy", 0),
    "GlobalAveragePool": ("avg_pool", 0), "GlobalMaxPool": ("max_pool", 0), "MaxPool": ("max_pool", 0),
    "AveragePool": ("avg_pool", 0),
}  # fmt: skip
"""Kernels of their own: the name they are timed under, and FLOPs per output element (pooling: per window)."""
