"""Element types of other frameworks as this package names them."""

from dataclasses import dataclass
from math import prod
from typing import Final

from perfmodel.units import DTYPE_BYTES

_NAMES: Final[dict[str, str]] = {
    "float64": "fp64", "f64": "fp64", "float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "f16": "fp16", "int8": "int8", "s8": "int8", "uint8": "int8", "u8": "int8",
}  # fmt: skip
_ITEM_BYTES: Final[dict[str, float]] = {
    "bool": 1, "pred": 1, "int4": 0.5, "s4": 0.5, "uint4": 0.5, "u4": 0.5, "int16": 2, "s16": 2, "uint16": 2,
    "u16": 2, "int32": 4, "s32": 4, "uint32": 4, "u32": 4, "int64": 8, "s64": 8, "uint64": 8, "u64": 8,
    "complex64": 8, "c64": 8, "complex128": 16, "c128": 16, "token": 0, "key<fry>": 8, "key<rbg>": 16, "float0": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Array:
    """Element type and shape of a value."""

    dtype: str
    """As the kernel tables name it; `fp32` for types that they lack (integers move like it)."""
    shape: tuple[int, ...]
    item_bytes: float

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...]) -> "Array":
        """From the element type's name in NumPy, HLO or ONNX."""
        if name.startswith(("float8", "f8")):
            return cls("fp8", shape, 1.0)
        known = _NAMES.get(name)
        if known is not None:
            return cls(known, shape, float(DTYPE_BYTES[known]))
        return cls("fp32", shape, float(_ITEM_BYTES.get(name, 4)))

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> float:
        return self.n_elements * self.item_bytes
