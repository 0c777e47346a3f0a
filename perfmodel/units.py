"""Units and element types, and numbers as people read them.

Everything inside the library is SI: seconds, bytes, FLOP/s.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
"""Bytes of one element as stored in memory (tf32 is a compute mode of 4-byte storage; fp4 with its
scales takes 9/16 of a byte and is rounded up)."""


DTYPE_ALIASES: Final[dict[str, str]] = {
    "fp64": "float64 double",
    "fp32": "float32 float single",
    "tf32": "tensorfloat32 tensorfloat-32",
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp8": "float8 e4m3 e5m2 fp8_e4m3 fp8_e5m2 float8_e4m3 float8_e5m2 float8_e4m3fn float8_e5m2fn e4m3fn mxfp8",
    "fp4": "float4 e2m1 fp4_e2m1 float4_e2m1fn nvfp4 mxfp4",
    "int8": "i8",
}
"""Other names of element types."""


def _dtype_of_alias() -> dict[str, str]:
    """The element type of each of its names."""
    dtype_of_alias = {}
    for dtype, aliases in DTYPE_ALIASES.items():
        dtype_of_alias |= dict.fromkeys((dtype, *aliases.split()), dtype)
    return dtype_of_alias


_DTYPE_OF: Final = _dtype_of_alias()


def dtype_name(text: str) -> str:
    """The element type for a name such as `bfloat16`, `torch.half` or `e4m3`; unknown names are
    returned unchanged."""
    # Accept names as people paste them from code.
    lower_name = text.strip().lower().removeprefix("torch.").removeprefix("jnp.")
    return _DTYPE_OF.get(lower_name, text)


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of `dtype`; raises `UnknownNameError` for a dtype not listed."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise UnknownNameError("dtype", dtype, DTYPE_BYTES) from None


# --- quantities as people write them
# -------------------------------------------------------------------

_SI_PREFIXES: Final = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY_PREFIXES: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _bytes_and_bits(per_second: bool) -> dict[str, float]:
    """Units of bytes and bits, or of their rates, with all prefixes: a large B is bytes, a small b
    or `bit` bits."""
    byte_units, bit_units = ("B",), ("bit", "b")
    if per_second:
        byte_units, bit_units = ("B/s", "Bps"), ("bit/s", "b/s", "bps")
    units = dict.fromkeys(byte_units, 1.0) | dict.fromkeys(bit_units, 1 / 8)
    for prefix, factor in (_SI_PREFIXES | _BINARY_PREFIXES).items():
        units |= {prefix + unit: factor for unit in byte_units}
        units |= {prefix + unit: factor / 8 for unit in bit_units}
    return units


def _rates_of_computing() -> dict[str, float]:
    """Units of FLOP/s with all decimal prefixes."""
    units = {}
    for prefix, factor in _SI_PREFIXES.items():
        units |= {prefix + unit: factor for unit in ("FLOP/s", "FLOPS", "flop/s", "flops")}
    return units


@dataclass(frozen=True)
class QuantityKind:
    """The notation of one kind of quantity."""

    what: str
    """Name of the kind, for messages: `... is not a valid WHAT`."""
    examples: str
    """Examples of such quantities."""
    units: Mapping[str, float]
    """Value of each unit in the unit that is used inside, which has the empty name."""


QUANTITY_KINDS: Final[Mapping[str, QuantityKind]] = {
    "time": QuantityKind(
        "time",
        "2ms, 50us or 0.002",
        {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    ),
    "tokens": QuantityKind(
        "number of tokens",
        "1e12, 1T or 300B",
        {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12},
    ),
    "sequence": QuantityKind(
        "sequence length",
        "4096, or 128k for 131,072",
        {"": 1.0, "k": 2.0**10, "K": 2.0**10, "Ki": 2.0**10, "M": 2.0**20, "Mi": 2.0**20},
    ),
    "bandwidth": QuantityKind(
        "bandwidth",
        "25e9 (bytes/s), 25GB/s or 200Gbit/s",
        {"": 1.0} | _bytes_and_bits(per_second=True),
    ),
    "memory": QuantityKind(
        "amount of memory", "80GiB or 85.9e9", {"": 1.0} | _bytes_and_bits(per_second=False)
    ),
    "rate": QuantityKind(
        "rate of computing",
        "989TFLOP/s",
        {"": 1.0} | _rates_of_computing(),
    ),
    "frequency": QuantityKind(
        "frequency", "1.98GHz", {"": 1.0, "Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9}
    ),
    "power": QuantityKind("power", "700W", {"": 1.0, "W": 1.0, "mW": 1e-3, "kW": 1e3, "MW": 1e6}),
}
_NUMBER_AND_UNIT: Final = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z/]*)\s*")


def parse_quantity(text: str, kind: str) -> float:
    """Parse a quantity of one of `QUANTITY_KINDS`, such as `200Gbit/s`, `1T` or `50us`, into SI
    units.

    Raises:
        PerfModelError: no such quantity, negative or not finite.
    """
    quantity = QUANTITY_KINDS[kind]
    match = _NUMBER_AND_UNIT.fullmatch(text)
    value = -1.0
    if match and match[2] in quantity.units:
        number, unit = match.groups()
        value = float(number) * quantity.units[unit]
    if not 0 <= value < float("inf"):
        raise PerfModelError(f"{text!r} is not a valid {quantity.what}; write {quantity.examples}")
    return value


def quantity_text(value: float, kind: str) -> str:
    """Write a quantity as `parse_quantity` reads it, in the unit that makes it shortest: `25GB/s`,
    `50us`.

    Args:
        value: value in SI units.
        kind: one of `QUANTITY_KINDS`.
    """
    texts: list[str] = []
    for unit, size in QUANTITY_KINDS[kind].units.items():
        if unit and 1 <= value / size < 1000:
            texts.append(f"{value / size:.12g}{unit}")
    return min(texts, key=len, default=f"{value:.12g}")


def parse_seconds(text: str) -> float:
    """Read `2ms`, `50us` or `0.002` (seconds); raises `PerfModelError` as `parse_quantity`."""
    return parse_quantity(text, "time")


LONGEST_SEQUENCE: Final = 100_000_000
"""Longest accepted sequence in tokens, over a hundred times the longest that models were trained
on."""


def parse_length(text: str) -> int:
    """Read a sequence length, `4096` or `128k` (131,072, because k means 1024 here).

    Raises:
        PerfModelError: no whole number above 0.
    """
    # The bound catches a unit too many, such as 128M for 128k.
    value = parse_quantity(text, "sequence")
    if value < 1 or value != int(value) or value > LONGEST_SEQUENCE:
        raise PerfModelError(
            f"{text!r} is not a valid sequence length, a whole number from 1 to {LONGEST_SEQUENCE:,}; write "
            f"{QUANTITY_KINDS['sequence'].examples}"
        )
    return int(value)


_PLAIN_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_PLAIN_NUMBER: Final = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
LARGEST_NUMBER: Final = 1e30
"""Larger than any plausible quantity in any unit; its inverse is the smallest plausible one."""


def plain_whole(text: str) -> int:
    """A whole number written in plain digits, such as `8` or `-1`.

    Python would read `1_0`, `+8`, digits of other scripts and blanks around a number too, which are
    usually slips.

    Raises:
        PerfModelError: another text; names it.
    """
    if not _PLAIN_WHOLE.fullmatch(text) or text == "-0":
        if text.isascii() and text.isdigit() and not text.startswith("0"):
            raise PerfModelError(f"{text[:40]!r} is too large; no quantity has so many digits")
        raise PerfModelError(f"{text[:40]!r} is not a whole number in plain digits, like 8")
    return int(text)


def plain_number(text: str) -> float:
    """A finite number in plain digits, such as `8`, `0.5` or `2e-6`.

    Raises:
        PerfModelError: another text, or a number that no quantity has; names it.
    """
    if not _PLAIN_NUMBER.fullmatch(text):
        raise PerfModelError(
            f"{text[:40]!r} is not a finite number in plain digits, like 0.5 or 2e-6"
        )
    value = float(text)
    if value == 0 and text.startswith("-"):
        raise PerfModelError(f"{text[:40]!r} is a negative zero; write 0")

    # Python reads 1e-999 as 0, which is not the stated number.
    states_zero = not text.lower().partition("e")[0].strip("-0.")
    if abs(value) > LARGEST_NUMBER or (abs(value) < 1 / LARGEST_NUMBER and not states_zero):
        raise PerfModelError(
            f"{text[:40]!r} is not plausible: quantities lie between 1e-30 and 1e30"
        )
    return value


def require_whole(owner: str, sizes: Mapping[str, Any], least: int = 1, most: int = 10**9) -> None:
    """Raise `PerfModelError` unless all of `owner`'s sizes are whole numbers from `least` to
    `most`.

    The message names all that are not.
    """
    wrong = []
    for name, value in sizes.items():
        # Most values are plain, and records are made by the thousand.
        if type(value) is not int:
            untraced(f"{owner}: {name}", value)
        if (
            not isinstance(value, Integral)
            or isinstance(value, bool)
            or not least <= int(value) <= most
        ):
            wrong.append(f"{name}={value!r}"[:60])
    if wrong:
        numbers = "whole numbers" if len(wrong) > 1 else "a whole number"
        raise PerfModelError(
            f"{owner}: {', '.join(wrong)} must be {numbers} from {least} to {most:,}"
        )


def divisors(n: int, limit: int | None = None) -> tuple[int, ...]:
    """Divisors of `n` in ascending order, none above `limit`."""
    # Divisors come in pairs, one of each at most the root.
    small_divisors = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    large_divisors = [n // k for k in small_divisors]
    ascending = sorted({*small_divisors, *large_divisors})
    return tuple(k for k in ascending if limit is None or k <= limit)


def require_seed(seed: int) -> None:
    """Raise `PerfModelError` unless `seed` is accepted by all random number generators."""
    require_whole("random numbers", {"seed": seed}, least=0, most=2**31 - 1)


def untraced(name: str, value: Any) -> None:
    """Raise `PerfModelError` for a value traced by JAX, because records hold plain numbers."""
    # By name, as this module imports no JAX.
    if any(base.__name__ == "Tracer" for base in type(value).__mro__):
        raise PerfModelError(
            f"{name} is traced by JAX, which predict cannot follow; differentiate, jit or vmap "
            "perfmodel.step_time_function(model, cluster, layout) instead"
        )


def positive(name: str, value: float) -> None:
    """Raise `PerfModelError` unless `value` is a finite number above zero."""
    if type(value) not in (int, float):
        untraced(name, value)
    if not (value > 0 and value < float("inf")):
        raise PerfModelError(f"{name} must be a finite number above zero, got {value!r}")


_PREFIXES: Final = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def figure(value: float, digits: int = 4) -> str:
    """Format a number with this many significant digits; exponents are used only below 0.001."""
    # Neither infinite nor NaN, which compares as false.
    if not abs(value) < float("inf"):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """Format a number with its unit and an SI prefix."""
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{figure(value / scale, digits)} {prefix}{unit}"
    return f"{figure(value, digits)} {unit}"


def duration(seconds: float) -> str:
    """Format a time in s, ms or us."""
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{figure(seconds / scale)} {unit}"
    return f"{figure(seconds / 1e-6, 3)} us"


def long_duration(seconds: float) -> str:
    """Format a time in days, hours or minutes; shorter ones as `duration` does."""
    for scale, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * scale:
            return f"{figure(seconds / scale, 3)} {unit}"
    return duration(seconds)


def span(low: str, high: str) -> str:
    """A range in words; a single figure if both ends read alike."""
    return low if low == high else f"{low} to {high}"


def relative(change: float, digits: int = 0) -> str:
    """Format a relative change in per cent, `+12%`; from ten times on as a factor, `45 times`."""
    return f"{change:+.{digits}%}" if change < 9 else f"{figure(1 + change, 3)} times"


def plural(noun: str, count: int) -> str:
    """The form of a noun that goes with a count: `1 node`, `2 nodes`, `2 processes`."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


def number_of(count: int, noun: str) -> str:
    """A number of things in words: `1 device`, `16 devices`."""
    return f"{count} {plural(noun, count)}"


def counted(value: float) -> str:
    """Format a number of tokens or an amount of money, with k, M, B or T."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{figure(value / scale, 3)}{letter}"
    return figure(value, 3)


def batch_words(global_batch: int | str, seq_len: int, unit: str) -> str:
    """Describe the batch of a step: `global batch 8, sequence 2048` for models of text, or `global
    batch of 8 images (256 tokens each)`.

    Args:
        global_batch: samples per step; several batches as one text.
        seq_len: tokens per sample; one where a sample is not divided into tokens.
        unit: what samples are: tokens (of text), images, videos or samples.
    """
    if unit == "tokens":
        return f"global batch {global_batch}, sequence {seq_len}"
    size = f" ({seq_len:,} tokens each)" if seq_len > 1 else ""
    return f"global batch of {global_batch} {unit}{size}"


MIN_FIT: Final = 0.9
"""Least probability of fitting into memory at which a layout is called fitting, and is recommended
by default."""


def fit_words(probability: float) -> str:
    """Words for a probability of fitting into memory, followed by the probability."""
    # By the figure that is shown, so that a text never says that 0.90 only likely fits.
    rounded = round(probability, 2)
    if rounded >= MIN_FIT:
        verdict = "fits"
    elif rounded >= 0.5:
        verdict = "likely fits"
    elif rounded > 0.1:
        verdict = "likely does not fit"
    else:
        verdict = "does not fit"
    return f"{verdict} (probability {probability:.2f})"
