"""`lazyio bench-engine`: whole prompts and decode steps, cold and warm, beside what the device and the trunk allow."""
