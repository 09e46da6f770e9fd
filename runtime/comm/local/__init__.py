"""The in-process transport: every rank a thread, with NCCL's or gloo's rules, and wires of a given speed.

Imports `comm`'s `base` and `clock`, and `job`.
"""
