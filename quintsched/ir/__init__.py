"""Intermediate representation of plans: mesh, stages and routes, instructions, and the one rule of their data flow.

Data types and facts about them only, no checks of plans and no transformations. Imports `quintsched.errors` and nothing
else of this project; every other package may import this one.
"""
