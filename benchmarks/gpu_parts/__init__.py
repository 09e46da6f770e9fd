"""What benchmarks/gpu.py and tests/gpu have in common, and the parts of the former: a file for each."""
