from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerooffload.formats import format_bytes, format_count, format_rate, format_seconds, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 << 30),
        ("512MiB", 512 << 20),
        ("1.5 KiB", 1536),
        (" 7 b ", 7),
        ("1.5 GB", 1_500_000_000),
        ("2tib", 2 << 40),
        ("3kB", 3000),
        ("1TB", 10**12),
        (0, 0),
        (123, 123),
    ],
)
def test_bytes_are_read_with_binary_and_decimal_units(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("bad", ["24", "GiB", "", "-1GiB", "1 potato", "1e3B", "1GiB extra", -1, True, 1.5, None])
def test_a_quantity_without_a_unit_or_sense_is_refused_and_named(bad: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_bytes(bad)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 50))
def test_bytes_written_with_the_unit_b_come_back_exactly(nbytes: int) -> None:
    assert parse_bytes(f"{nbytes}B") == nbytes


@given(st.integers(0, 1 << 55))
def test_a_formatted_count_is_within_a_hundredth_of_what_was_meant(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1610612736, "1.50 GiB"), (300 << 20, "300 MiB")],
)
def test_byte_counts_have_three_digits_and_a_unit(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.5, "0.50 B/s"),
        (12.34, "12.3 B/s"),
        (999.6, "1.00 kB/s"),
        (3.316e9, "3.32 GB/s"),
        (65.68e12, "65.7 TB/s"),
        (2.5e15, "2500 TB/s"),
    ],
)
def test_rates_have_three_digits_and_a_decimal_prefix(rate: float, text: str) -> None:
    assert format_rate(rate) == text
    assert format_rate(rate, "FLOP") == text.replace("B/s", "FLOP/s")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (17, "17"),
        (999, "999"),
        (1200, "1.20 k"),
        (134_515_008, "135 M"),
        (999_600_000, "1.00 B"),
        (8_030_261_248, "8.03 B"),
        (32 * 10**12, "32.0 T"),
        (10**16, "10000 T"),
    ],
)
def test_counts_have_three_digits_and_a_unit(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00085, "850 us"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (3599.7, "1 h 00 min"),
    ],
)
def test_durations_are_written_in_their_own_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_rounding_up_gives_the_least_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple
