"""Measurement of this machine's speed: `quintsched calibrate` writes it into a description of hardware.

`time_operations` times the computations of a rank, `time_links` communication between ranks in processes and how they
share the cores, `machine_description` keeps what was measured, and combines all into one description. Imports `comm`;
nothing imports this room.
"""
