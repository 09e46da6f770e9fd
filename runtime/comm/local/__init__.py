"""The in-process transport: every rank a thread, with the semantics of NCCL or gloo, and links of a given speed.

Imports `comm`'s `transport_interface`, `checked`, `clocks`, `device` and `host_copies`, and `settings` and `watch`.
"""
