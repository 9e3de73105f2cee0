from collections.abc import Callable

from lazyio.bench.runs import Run

# What programs that read the results rely on.
KEYS = """
    mode backend_used fallback_reason direct_io temperature round rows unique_rows reads bytes_read device_read_bytes
    syscr wall_s user_s system_s major_faults service_us_mean effective_concurrency workers resident_pages_before
    rows_per_s reads_per_s ratio_to_device_limit p50_us p99_us arm limit_before limit_after counted ratio_to_take
    rows_per_cpu_s cache_hits
"""


def test_keys_of_a_run(make_run: Callable[..., Run]) -> None:
    document = make_run("on", round=3).as_json()
    assert set(KEYS.split()) <= set(document)
    assert (document["mode"], document["round"], document["ratio_to_take"]) == ("on", 3, None)
