"""Element types as JAX knows them."""

from typing import Final

JAX_DTYPES: Final = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int64": "int64",
    "int32": "int32",
    "int8": "int8",
    "bool": "bool",
}
"""JAX's name of each dtype that programs can be executed in."""
