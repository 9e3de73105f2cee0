"""`lazyio bench`: how fast each lazy mode gathers, in turns on one file, beside the device's own limit.

`save_trace` records the gathers of a program, for `lazyio bench --trace` to repeat.
"""

from lazyio.bench.workload import save_trace

__all__ = ["save_trace"]
