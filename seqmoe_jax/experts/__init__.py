"""Where expert weights are: pinned host memory, the slot cache on the device, and which expert leaves it."""
