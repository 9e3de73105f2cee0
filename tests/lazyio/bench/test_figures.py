import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench.figures import ratio, short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (0.476, "0.48"),
        (9.99, "9.99"),
        (9.996, "10"),
        (10.5, "10.5"),
        (53.0, "53"),
        (843.2, "843"),
        (9999.4, "9,999"),
        (9999.6, "10.0k"),
        (88_512.0, "88.5k"),
        (99_960.0, "100k"),
        (999_400.0, "999k"),
        (999_600.0, "1.00M"),
        (9_994_000.0, "9.99M"),
        (9_996_000.0, "10.0M"),
        (21_212_899.0, "21.2M"),
        (1_500_000_000.0, "1,500M"),
    ],
)
def test_short(value: float, text: str) -> None:
    assert short(value) == text


@given(st.floats(1e-2, 1e9))
def test_short_keeps_three_digits_and_few_letters(value: float) -> None:
    text = short(value)
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1)
    assert float(text.rstrip("kM").replace(",", "")) * factor == pytest.approx(value, rel=0.0051, abs=0.0051)
    assert len(text) <= 6


@pytest.mark.parametrize(
    ("value", "text"), [(12.34, "12.3"), (1.254, "1.25"), (0.1, "0.10"), (0.0994, "0.099"), (0.00061, "0.001")]
)
def test_ratio(value: float, text: str) -> None:
    assert ratio(value) == text
