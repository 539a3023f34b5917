"""The cost of operations at 1, 10, 100 and 1,000 times a size, see `benchmarks.scale.__main__`."""
