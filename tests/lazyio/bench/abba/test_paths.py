from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.bench.abba.paths import Place
from lazyio.errors import RunFailed, SettingError

DOCUMENT: dict[str, Any] = {
    "prompts": [
        {
            "rounds": [
                [
                    {"way": {"mode": "off", "lookahead": 2}, "again": False, "run": {"wall_s": 1.0}},
                    {"way": {"mode": "uring", "lookahead": 2}, "again": False, "run": {"wall_s": 2.0}},
                    {"way": {"mode": "off", "lookahead": 2}, "again": True, "run": {"wall_s": 3.0}},
                ],
                [{"way": {"mode": "uring", "lookahead": 2}, "again": False, "run": {"wall_s": 4.0}}],
            ]
        }
    ],
    "metrics": {"x": 5, "0": "zero"},
    "none": None,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics.x", [5]),
        ("metrics.0", ["zero"]),
        ("none", [None]),
        ("prompts.0.rounds.0.1.run.wall_s", [2.0]),
        ("prompts.-1.rounds.-1.-1.run.wall_s", [4.0]),
        ("prompts.*.rounds.*.*.run.wall_s", [1.0, 2.0, 3.0, 4.0]),
        ("prompts.0.rounds.*.[way.mode=uring].run.wall_s", [2.0, 4.0]),
        ("prompts.0.rounds.*.[way.mode=off,again=true].run.wall_s", [3.0]),
        ("prompts.0.rounds.*.[way.lookahead=2,again=false].run.wall_s", [1.0, 2.0, 4.0]),
        ("prompts.0.rounds.*.[run.wall_s=3.0].way.mode", ["off"]),
    ],
)
def test_what_is_at_a_place(text: str, expected: list[Any]) -> None:
    assert Place.parse(text).values(DOCUMENT) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a[0]",
        "a.[b]",
        "a.[b=1",
        "a.b=1]",
        "a.[]",
        "a.[b=1,]",
        "a.[=1]",
        "[b=1].[",
        "a.[b=[]]",
    ],
)
def test_what_is_no_path(text: str) -> None:
    with pytest.raises(SettingError, match="is no path; write keys, numbers"):
        Place.parse(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("wall_s", "there is nothing at wall_s: the document is an object with prompts, metrics, none"),
        ("metrics.y.z", "metrics is an object with x, 0"),
        ("metrics.x.z", "metrics.x is 5"),
        ("prompts.1", "prompts is a list of 1"),
        ("prompts.-2", "prompts is a list of 1"),
        ("prompts.x", "prompts is a list of 1"),
        ("metrics.*", "metrics is an object"),
        ("prompts.0.rounds.*.[way.mode=on].run", r"prompts.0.rounds.\* is a list of 3"),
        ("prompts.0.rounds.*.[mode=uring].run", r"prompts.0.rounds.\* is a list of 3"),
    ],
)
def test_what_is_not_there(text: str, told: str) -> None:
    with pytest.raises(RunFailed, match=told):
        Place.parse(text).values(DOCUMENT)


@given(st.lists(st.one_of(st.integers(0, 3), st.text("abz", min_size=1, max_size=3)), min_size=1, max_size=5))
def test_the_way_down_and_back(steps: list[int | str]) -> None:
    document: Any = "leaf"
    for step in reversed(steps):
        document = {step: document} if isinstance(step, str) else [None] * step + [document]
    assert Place.parse(".".join(map(str, steps))).values(document) == ["leaf"]
