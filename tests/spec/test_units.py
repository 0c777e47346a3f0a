"""Units: what every word means in SI, and how numbers are printed for people."""

from typing import Any

import pytest

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.units import (
    GB,
    GIB,
    KIB,
    MIB,
    counted,
    divisors,
    dtype_bytes,
    duration,
    figure,
    fit_words,
    long_duration,
    parse_length,
    parse_quantity,
    parse_seconds,
    plain_number,
    plain_whole,
    plural,
    positive,
    quantity_text,
    require_seed,
    require_whole,
    scaled,
)

BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8}


def test_binary_and_decimal_prefixes() -> None:
    assert (KIB, MIB, GIB) == (2**10, 2**20, 2**30)
    assert GB == 10**9


@pytest.mark.parametrize(("dtype", "bits"), BITS.items())
def test_an_element_takes_its_bits(dtype: str, bits: int) -> None:
    assert 8 * dtype_bytes(dtype) == bits


def test_four_bits_with_their_scales_are_rounded_up_to_a_byte() -> None:
    assert dtype_bytes("fp4") == 1


def test_an_element_type_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="fp12"):
        dtype_bytes("fp12")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2ms", 2e-3),
        ("50us", 50e-6),
        ("7ns", 7e-9),
        ("3s", 3.0),
        ("0.002", 0.002),
        ("1.5", 1.5),
        ("0", 0.0),
        ("1e-3s", 1e-3),
    ],
)
def test_times_are_read_in_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "ms", "fast", "-1ms", "-0.5", "nan", "inf", "1 h 2"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(PerfModelError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("200Gbit/s", "bandwidth", 25e9),
        ("200Gbps", "bandwidth", 25e9),
        ("200 Gb/s", "bandwidth", 25e9),
        ("25GB/s", "bandwidth", 25e9),
        ("25GBps", "bandwidth", 25e9),
        ("3.35TB/s", "bandwidth", 3.35e12),
        ("1GiB/s", "bandwidth", 2**30),
        ("25e9", "bandwidth", 25e9),
        ("100Mbit/s", "bandwidth", 12.5e6),
        ("1T", "tokens", 1e12),
        ("300B", "tokens", 3e11),
        ("15e12", "tokens", 15e12),
        ("1.5M", "tokens", 1.5e6),
        ("50us", "time", 50e-6),
        ("2ms", "time", 2e-3),
        ("0.5", "time", 0.5),
        ("2 h", "time", 7200.0),
        ("80GiB", "memory", 80 * 2**30),
        ("80GB", "memory", 80e9),
        ("512MiB", "memory", 2**29),
        ("700W", "power", 700.0),
        ("0.7kW", "power", 700.0),
        ("989TFLOP/s", "rate", 989e12),
        ("1.5GHz", "frequency", 1.5e9),
    ],
)
def test_quantities_are_read_with_their_units(text: str, kind: str, value: float) -> None:
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "unit", "value"),
    [
        ("bandwidth", "B/s", 1.0),
        ("bandwidth", "Bps", 1.0),
        ("bandwidth", "bit/s", 1 / 8),
        ("bandwidth", "b/s", 1 / 8),
        ("bandwidth", "bps", 1 / 8),
        ("memory", "B", 1.0),
        ("memory", "bit", 1 / 8),
        ("memory", "b", 1 / 8),
    ],
)
def test_prefixes_of_bytes_and_bits_are_a_thousand_or_1024_apart(
    kind: str, unit: str, value: float
) -> None:
    assert parse_quantity(f"3{unit}", kind) == 3 * value
    for power, prefix in enumerate("kMGTPE", start=1):
        assert parse_quantity(f"3{prefix}{unit}", kind) == pytest.approx(
            3 * value * 1000**power, rel=1e-12
        )
    for power, prefix in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1):
        assert parse_quantity(f"3{prefix}{unit}", kind) == 3 * value * 1024**power


@pytest.mark.parametrize(
    ("kind", "unit", "value"),
    [("rate", f"{prefix}FLOP/s", 1000.0**power) for power, prefix in enumerate("kMGTPE", start=1)]
    + [
        ("frequency", f"{prefix}Hz", 1000.0**power)
        for power, prefix in enumerate(("", "k", "M", "G"))
    ]
    + [("tokens", unit, 1000.0**power) for power, unit in enumerate(("", "k", "M", "B", "T"))]
    + [("power", "mW", 1e-3), ("power", "MW", 1e6), ("time", "min", 60.0), ("time", "ns", 1e-9)]
    + [
        ("tokens", "K", 1e3),
        ("tokens", "G", 1e9),
        ("sequence", "Ki", 1024.0),
        ("sequence", "Mi", 1024.0**2),
    ],
)
def test_other_units_are_what_their_prefix_says(kind: str, unit: str, value: float) -> None:
    assert parse_quantity(f"3{unit}", kind) == pytest.approx(3 * value, rel=1e-12)


@pytest.mark.parametrize(
    "kind", ["bandwidth", "tokens", "time", "memory", "power", "rate", "frequency", "sequence"]
)
@pytest.mark.parametrize(
    "text", ["", "k", "-1", "nan", "inf", "1e999", "1_000", "1 2", "5 parsecs", "0x10", "1,5"]
)
def test_what_is_no_quantity_is_refused_with_examples(text: str, kind: str) -> None:
    with pytest.raises(PerfModelError, match=r"is not a valid .*; write "):
        parse_quantity(text, kind)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("128k", 131072),
        ("8K", 8192),
        ("1M", 2**20),
        ("0.5k", 512),
        ("1", 1),
        ("95M", 95 * 2**20),
        ("100000000", 100_000_000),
    ],
)
def test_lengths_of_sequences_count_in_1024(text: str, length: int) -> None:
    assert parse_length(text) == length


@pytest.mark.parametrize("text", ["0", "0.3", "1e14", "1.5", "2T", "96M", "100000001"])
def test_what_is_no_length_of_a_sequence_is_refused(text: str) -> None:
    with pytest.raises(PerfModelError, match="is not a valid sequence length"):
        parse_length(text)


@pytest.mark.parametrize(
    ("text", "number"), [("8", 8), ("0", 0), ("-1", -1), ("007", 7), ("9" * 18, 10**18 - 1)]
)
def test_whole_numbers_are_read_in_plain_digits(text: str, number: int) -> None:
    assert plain_whole(text) == number


@pytest.mark.parametrize(
    "text", ["", "-0", "+8", "1_0", " 8", "8 ", "8.0", "8e3", "٨", "--1", "1-"]
)
def test_whole_numbers_in_other_writing_are_refused(text: str) -> None:
    with pytest.raises(PerfModelError, match="plain digits"):
        plain_whole(text)


def test_a_whole_number_that_is_too_long_is_called_too_large() -> None:
    with pytest.raises(PerfModelError, match=r"'9{19}' is too large"):
        plain_whole("9" * 19)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8.0),
        ("0", 0.0),
        ("0e5", 0.0),
        ("-0.5", -0.5),
        (".5", 0.5),
        ("2.", 2.0),
        ("2e-6", 2e-6),
        ("1E+3", 1000.0),
        ("1e30", 1e30),
        ("1e-30", 1e-30),
        ("-1e30", -1e30),
    ],
)
def test_numbers_are_read_in_plain_digits(text: str, number: float) -> None:
    assert plain_number(text) == number


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "plain digits"),
        ("1_0.5", "plain digits"),
        ("+2", "plain digits"),
        ("nan", "plain digits"),
        ("inf", "plain digits"),
        ("1e", "plain digits"),
        (".", "plain digits"),
        ("-0.0", "negative zero"),
        ("2e30", "not plausible"),
        ("-2e30", "not plausible"),
        ("9e-31", "not plausible"),
        ("1e-400", "not plausible"),
        ("1e400", "not plausible"),
    ],
)
def test_numbers_that_no_quantity_has_are_refused(text: str, why: str) -> None:
    with pytest.raises(PerfModelError, match=why):
        plain_number(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.0, "12 s"),
        (1.0, "1 s"),
        (0.999, "999 ms"),
        (1e-3, "1 ms"),
        (9.9e-4, "990 us"),
        (2.5e-6, "2.5 us"),
    ],
)
def test_short_times_are_printed_in_s_ms_or_us(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert duration(-seconds) == f"-{text}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2 * 86400.0, "2 days"),
        (10 * 86400.0, "10 days"),
        (2 * 86400.0 - 3600, "47 h"),
        (2 * 3600.0, "2 h"),
        (2 * 3600.0 - 60, "119 min"),
        (120.0, "2 min"),
        (119.0, "119 s"),
        (0.5, "500 ms"),
    ],
)
def test_long_times_are_printed_in_days_hours_or_minutes(seconds: float, text: str) -> None:
    assert long_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5e12, "1.5T"),
        (1e12, "1T"),
        (2e9, "2B"),
        (1e9, "1B"),
        (3e6, "3M"),
        (1e6, "1M"),
        (4e3, "4k"),
        (1e3, "1k"),
        (999.0, "999"),
        (12.34, "12.3"),
    ],
)
def test_tokens_and_money_are_counted_in_thousands(value: float, text: str) -> None:
    assert counted(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e18, "3 EFLOP/s"),
        (2e15, "2 PFLOP/s"),
        (312e12, "312 TFLOP/s"),
        (1e9, "1 GFLOP/s"),
        (25e6, "25 MFLOP/s"),
        (1e3, "1 kFLOP/s"),
        (999.0, "999 FLOP/s"),
        (-2e15, "-2 PFLOP/s"),
    ],
)
def test_figures_with_units_take_a_prefix_per_thousand(value: float, text: str) -> None:
    assert scaled(value, "FLOP/s") == text


def test_figures_have_so_many_significant_digits_and_no_exponent() -> None:
    assert [figure(v) for v in (0.12345, 1.23456, 123.456, 999.96, 1000.4, 1234567.0)] == [
        "0.1235",
        "1.235",
        "123.5",
        "1000",
        "1,000",
        "1,234,567",
    ]
    assert figure(12.34, 2) == "12"
    assert figure(float("nan")) == figure(float("inf")) == figure(-float("inf")) == "-"


@pytest.mark.parametrize("n", [1, 2, 12, 16, 36, 97, 5040])
def test_divisors_are_all_that_divide(n: int) -> None:
    dividing = [k for k in range(1, n + 1) if n % k == 0]
    assert divisors(n) == tuple(dividing)
    for most in (1, 3, 4, n):
        assert divisors(n, most) == tuple(k for k in dividing if k <= most)


def test_whole_numbers_lie_between_their_ends() -> None:
    require_whole("job", {"a": 1, "b": 10**9})
    require_whole("job", {"a": 0, "b": 8}, least=0, most=8)
    for sizes in ({"a": 0}, {"a": 10**9 + 1}, {"a": 1.0}, {"a": True}, {"a": "8"}, {"a": None}):
        with pytest.raises(PerfModelError, match=r"^job: a=\S+ must be a whole number from 1 to "):
            require_whole("job", sizes)
    with pytest.raises(
        PerfModelError, match=r"a=0, c=-1 must be whole numbers from 1 to 1,000,000,000"
    ):
        require_whole("job", {"a": 0, "b": 2, "c": -1})


def test_seeds_are_those_that_every_generator_takes() -> None:
    for seed in (0, 7, 2**31 - 1):
        require_seed(seed)
    for seed in (-1, 2**31, 0.5):
        with pytest.raises(PerfModelError, match="seed"):
            require_seed(seed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_positive_number_is_above_zero_and_finite(value: float) -> None:
    positive("rate", 1e-30)
    with pytest.raises(PerfModelError, match="rate must be a finite number above zero"):
        positive("rate", value)


@pytest.mark.parametrize(
    "check", [lambda x: positive("rate", x), lambda x: require_whole("job", {"batch": x})]
)
def test_values_that_jax_traces_are_refused_with_the_function_that_takes_them(check: Any) -> None:
    import jax

    with pytest.raises(PerfModelError, match=r"traced by JAX.*step_time_function"):
        jax.jit(lambda x: check(x))(2.0)


@pytest.mark.parametrize(("noun", "many"), [("node", "nodes"), ("process", "processes")])
def test_a_noun_goes_with_its_count(noun: str, many: str) -> None:
    assert plural(noun, 1) == noun
    assert [plural(noun, count) for count in (0, 2, 1_000)] == [many] * 3


@pytest.mark.parametrize(
    ("probability", "verdict"),
    [
        (1.0, "fits"),
        (0.9, "fits"),
        (0.896, "fits"),  # shown as 0.90
        (0.89, "likely fits"),
        (0.5, "likely fits"),
        (0.49, "likely does not fit"),
        (0.11, "likely does not fit"),
        (0.1, "does not fit"),
        (0.0, "does not fit"),
    ],
)
def test_words_for_fitting_follow_the_probability_that_is_shown(
    probability: float, verdict: str
) -> None:
    assert fit_words(probability).startswith(f"{verdict} (")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (25e9, "bandwidth", "25GB/s"),
        (123.456e9, "bandwidth", "123.456GB/s"),
        (5e-6, "time", "5us"),
        (0.05, "time", "50ms"),
        (7200.0, "time", "2h"),
        (80 * 2.0**30, "memory", "80GiB"),
        (80e9, "memory", "80GB"),
        (350.0, "power", "350W"),
        (0.0, "time", "0"),
        (1e-12, "time", "1e-12"),
    ],
)
def test_quantities_are_written_as_they_are_read(value: float, kind: str, text: str) -> None:
    assert quantity_text(value, kind) == text
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-11)


def test_a_message_counts_the_numbers_that_are_not_whole() -> None:
    with pytest.raises(PerfModelError, match=r"job: a=0 must be a whole number from 1"):
        require_whole("job", {"a": 0, "b": 2}, least=1)
    with pytest.raises(PerfModelError, match=r"job: a=0, b=1.5 must be whole numbers from 1"):
        require_whole("job", {"a": 0, "b": 1.5}, least=1)


@pytest.mark.parametrize(
    ("prefix", "size"),
    [
        (prefix, 10.0**exponent)
        for prefix, exponent in (("", 0), ("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12))
    ]
    + [
        (f"{prefix}i", 2.0**exponent)
        for prefix, exponent in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
    ],
)
def test_a_prefix_is_the_same_factor_of_every_unit(prefix: str, size: float) -> None:
    assert parse_quantity(f"3{prefix}B", "memory") == 3 * size
    assert parse_quantity(f"3{prefix}B/s", "bandwidth") == 3 * size
    assert (
        parse_quantity(f"8{prefix}b/s", "bandwidth")
        == parse_quantity(f"8{prefix}bit/s", "bandwidth")
        == size
    )


def test_figures_are_shortened_to_few_digits() -> None:
    assert (figure(12345.6), figure(1.23456), figure(12.3456, 2)) == ("12,346", "1.235", "12")
    assert (scaled(1.23456e12, "B"), scaled(123.456, "B", 2)) == ("1.23 TB", "123 B")
