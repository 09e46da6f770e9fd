"""Plans as text: one rank's list, the surroundings of a fault, aligned tables.

Imports `ir` alone, so that a proof can show its counter-example.
"""
