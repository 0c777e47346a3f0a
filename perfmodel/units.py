"""Units and element types. Everything inside the library is SI: seconds, bytes, FLOP/s."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Final

from perfmodel.errors import PerfModelError, UnknownNameError

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
GB: Final = 10**9

DTYPE_BYTES: Final[dict[str, int]] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "fp4": 1,
    "int8": 1,
}
"""Bytes of one element as stored in memory (tf32 is a compute mode of 4-byte storage; fp4 with its scales takes 9/16 of
a byte and is rounded up)."""


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of `dtype`; raises `UnknownNameError` for a dtype not listed."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise UnknownNameError("dtype", dtype, DTYPE_BYTES) from None


_TIMES: Final = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_seconds(text: str) -> float:
    """Read `2ms`, `50us` or `0.002` (seconds).

    Raises:
        PerfModelError: no time, or a negative one.
    """
    number, unit = (text[:-2], text[-2:]) if text[-2:] in _TIMES else (text.removesuffix("s"), "")
    try:
        value = float(number) * _TIMES.get(unit, 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise PerfModelError(f"{text!r} is no time; write 2ms, 50us or 0.002")
    return value


def whole(owner: str, sizes: Mapping[str, Any], least: int = 1, most: int = 10**9) -> None:
    """Raise `PerfModelError` unless all of `owner`'s sizes are whole numbers from `least` to `most`; names all that are
    not."""
    for name, value in sizes.items():
        untraced(f"{owner}: {name}", value)
    wrong = [
        f"{name}={value!r}"[:60]
        for name, value in sizes.items()
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most
    ]
    if wrong:
        raise PerfModelError(f"{owner}: {', '.join(wrong)} must be whole numbers from {least} to {most:,}")


def untraced(name: str, value: Any) -> None:
    """Raise `PerfModelError` for a value that JAX traces: records of plain numbers cannot hold one."""
    if any(base.__name__ == "Tracer" for base in type(value).__mro__):
        raise PerfModelError(
            f"{name} is traced by JAX, which predict cannot follow; differentiate, jit or vmap "
            "perfmodel.step_time_function(model, cluster, layout) instead"
        )


def positive(name: str, value: float) -> None:
    """Raise `PerfModelError` unless `value` is a finite number above zero."""
    untraced(name, value)
    if not (value > 0 and value < float("inf")):
        raise PerfModelError(f"{name} must be a finite number above zero, got {value!r}")
