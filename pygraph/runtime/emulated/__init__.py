"""The emulated device and its driver, for machines without a GPU."""
