"""Units and element types, and numbers as people read them. Everything inside the library is SI: seconds, bytes,
FLOP/s."""

import re
from collections.abc import Mapping
from math import isqrt
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


_PLAIN_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_PLAIN_NUMBER: Final = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
LARGEST_NUMBER: Final = 1e30
"""Beyond any quantity in any unit; a number below its inverse is as unlikely."""


def plain_whole(text: str) -> int:
    """A whole number written in plain digits, such as `8` or `-1`.

    Python would read `1_0`, `+8`, digits of other scripts and blanks around a number too, which are usually slips.

    Raises:
        PerfModelError: another text; names it.
    """
    if not _PLAIN_WHOLE.fullmatch(text) or text == "-0":
        raise PerfModelError(f"{text[:40]!r} is not a whole number in plain digits, like 8")
    return int(text)


def plain_number(text: str) -> float:
    """A finite number in plain digits, such as `8`, `0.5` or `2e-6`.

    Raises:
        PerfModelError: another text, or a number that no quantity has; names it.
    """
    if not _PLAIN_NUMBER.fullmatch(text):
        raise PerfModelError(f"{text[:40]!r} is not a finite number in plain digits, like 0.5 or 2e-6")
    value = float(text)
    if value == 0 and text.startswith("-"):
        raise PerfModelError(f"{text[:40]!r} is a negative zero; write 0")
    states_zero = not text.lower().partition("e")[0].strip("-0.")
    if abs(value) > LARGEST_NUMBER or (abs(value) < 1 / LARGEST_NUMBER and not states_zero):
        raise PerfModelError(f"{text[:40]!r} is not plausible: no quantity is beyond 1e30 or nearer to 0 than 1e-30")
    return value


def whole(owner: str, sizes: Mapping[str, Any], least: int = 1, most: int = 10**9) -> None:
    """Raise `PerfModelError` unless all of `owner`'s sizes are whole numbers from `least` to `most`; names all that are
    not."""
    wrong = []
    for name, value in sizes.items():
        if type(value) is not int:  # which most are: records are made by the thousand
            untraced(f"{owner}: {name}", value)
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
            wrong.append(f"{name}={value!r}"[:60])
    if wrong:
        raise PerfModelError(f"{owner}: {', '.join(wrong)} must be whole numbers from {least} to {most:,}")


def divisors(n: int, most: int | None = None) -> tuple[int, ...]:
    """Whole numbers that divide `n`, ascending, none above `most`."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return tuple(k for k in sorted({*small, *(n // k for k in small)}) if most is None or k <= most)


def require_seed(seed: int) -> None:
    """Raise `PerfModelError` unless `seed` is one that every generator of random numbers takes."""
    whole("random numbers", {"seed": seed}, least=0, most=2**31 - 1)


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


_PREFIXES: Final = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: float, digits: int = 4) -> str:
    """A number to so many significant digits, never with an exponent above a thousandth."""
    if not abs(value) < float("inf"):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """A figure with its unit, in thousands, millions and so on."""
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{figure(value / scale, digits)} {prefix}{unit}"
    return f"{figure(value, digits)} {unit}"


def duration(seconds: float) -> str:
    """A time in s, ms or us."""
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{figure(seconds / scale)} {unit}"
    return f"{figure(seconds / 1e-6, 3)} us"


def long_duration(seconds: float) -> str:
    """Days, hours or minutes; seconds and less as `duration`."""
    for scale, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * scale:
            return f"{figure(seconds / scale, 3)} {unit}"
    return duration(seconds)


def counted(value: float) -> str:
    """Tokens, or money: in thousands (k), millions (M), billions (B) or trillions (T)."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{figure(value / scale, 3)}{letter}"
    return figure(value, 3)


MIN_FIT: Final = 0.9
"""Probability of fitting into memory from which a layout is said to fit, and is recommended unless told otherwise."""


def fit_words(probability: float) -> str:
    """What a probability of fitting into memory means, in words, with the probability itself."""
    shown = round(probability, 2)
    if shown >= MIN_FIT:
        words = "fits"
    elif shown >= 0.5:
        words = "likely fits"
    elif shown > 0.1:
        words = "likely does not fit"
    else:
        words = "does not fit"
    return f"{words} (probability {probability:.2f})"
