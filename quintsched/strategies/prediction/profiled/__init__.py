"""Predictions from measurements: `predict_from_profile` from any profile, `measured_hardware` with measured rates.

Imports `profiles` and the rest of `prediction`.
"""
