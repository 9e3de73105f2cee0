import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyio.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("90b", 90),
        ("90 B", 90),
        ("512KiB", 512 << 10),
        ("512kb", 512 << 10),
        ("512K", 512 << 10),
        (" 1.5 GiB ", 3 << 29),
        ("2g", 2 << 30),
        ("0.1T", (1 << 40) // 10),
        ("9223372036854775807", 2**63 - 1),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


NO_NUMBERS = ["", " ", "GiB", "b", "-1", "-1G", "+1", "1e3", "1_000", "nan", "inf", "1 2", "1,5G", ".5G", "1.G", "٣"]
NO_UNITS = ["1kk", "1ki b", "1P", "1 byte", "five"]
NO_WHOLE_BYTES = ["1.5", "0.5 b"]
TOO_LARGE = ["9223372036854775808", "8388608T"]


@pytest.mark.parametrize("text", NO_NUMBERS + NO_UNITS + NO_WHOLE_BYTES + TOO_LARGE)
def test_what_is_not_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write for example 4096, 512MiB or 1\.5GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (90, "90 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (28_800_138_240, "26.8 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_counts(count: int, text: str) -> None:
    assert format_bytes(count) == text


@settings(deadline=None, max_examples=100)
@given(st.integers(0, (1 << 63) - 1 - (1 << 58)))
def test_what_is_written_can_be_read_and_is_near(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.05 * count


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789. kmgtib-e", max_size=12))
def test_any_text_gives_a_count_or_a_valueerror(text: str) -> None:
    try:
        count = parse_bytes(text)
    except ValueError as error:
        assert "is not a size" in str(error)  # noqa: PT017
    else:
        assert 0 <= count < 1 << 63
