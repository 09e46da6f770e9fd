"""Parts of benchmarks/gpu.py, a file for each, and helpers shared with tests/gpu."""
