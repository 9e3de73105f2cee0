"""`lazyio bench`: how fast each lazy mode gathers, in turns on one file, beside the device's own limit."""
