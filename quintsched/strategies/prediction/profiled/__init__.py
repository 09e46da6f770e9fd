"""Predictions from measurements: `predict` from any profile, `hardware` with the rates of a measured step.

Imports `profiles` and the rest of `prediction`.
"""
