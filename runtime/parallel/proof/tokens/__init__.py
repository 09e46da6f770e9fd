"""Whether a block does with tokens what it does where sequences are cut over cp, or into slices: at all numbers.

Imports the files of `proof` that follow owners and run twins.
"""
