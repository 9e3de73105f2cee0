from pathlib import Path

import pytest

from lazyio.fetchers import Fetcher, FetcherOptions, load
from lazyio.fetchers.conformance import write_rows
from lazyio.fetchers.faults import Faults, with_faults
from lazyio.fetchers.trace import traced


@pytest.mark.parametrize("name", ["resident", "mmap", "pread"])
def test_a_wrapper_looks_like_what_it_wraps(tmp_path: Path, name: str) -> None:
    made = write_rows(tmp_path, 90, [("a", 77, 50), ("b", 0, 3)])
    inner = load(name)(made.extents, 90, FetcherOptions(workers=7))
    inner.fell_back = "for some reason"
    with traced(with_faults(inner, Faults())) as wrapper:
        for attribute in (
            "extents", "row_bytes", "options", "files", "alignment", "direct_io", "queue_depth", "workers", "fell_back",
        ):  # fmt: skip
            assert getattr(wrapper, attribute) == getattr(inner, attribute), attribute


def test_no_attribute_of_fetchers_is_forgotten(tmp_path: Path) -> None:
    class Plain(Fetcher):
        read = None

    made = write_rows(tmp_path, 90, [("a", 0, 5)])
    plain = Plain(made.extents, 90, FetcherOptions())
    with traced(plain) as wrapper:
        assert set(vars(plain)) <= set(vars(wrapper))
