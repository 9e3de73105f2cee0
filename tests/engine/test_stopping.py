from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyio.engine.stopping import StopStrings


def shown(strings: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    """What is certain after each piece, up to a stop string, and what is left at the end; whether one was found."""
    stop = StopStrings(strings)
    texts = []
    for piece in pieces:
        texts.append(stop.add(piece))
        if stop.found:
            return texts, True
    return [*texts, stop.end()], False


@pytest.mark.parametrize(
    ("strings", "pieces", "texts", "found"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["so", " END of"], ["so", " "], True),
        (["END"], ["so E", "N", "D"], ["so ", "", ""], True),
        (["END"], ["so E", "N", "d"], ["so ", "", "ENd", ""], False),
        (["END"], ["EEN", "D"], ["E", ""], True),
        (["END"], ["so EN"], ["so ", "EN"], False),
        (["b", "ab"], ["xab"], ["x"], True),
        (["aab"], ["aaab"], ["a"], True),
    ],
)
def test_what_is_shown(strings: list[str], pieces: list[str], texts: list[str], found: bool) -> None:
    assert shown(strings, pieces) == (texts, found)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=3), max_size=8))
def test_it_is_the_text_up_to_the_first_stop_string(strings: list[str], pieces: list[str]) -> None:
    texts, found = shown(strings, pieces)
    # Text ends with the first piece that completes a string, at the first string that is in it then.
    seen = ""
    for piece in pieces:
        seen += piece
        places = [place for place in map(seen.find, strings) if place >= 0]
        if places:
            assert ("".join(texts), found) == (seen[: min(places)], True)
            return
    assert ("".join(texts), found) == (seen, False)
