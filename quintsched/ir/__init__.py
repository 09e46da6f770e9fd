"""What a plan is made of: the mesh, the stages and routes on it, the instructions, and the one rule of their data flow.

Here are words and facts about them, no judgement and no transformation. Imports `quintsched.errors` and nothing else
of this project; every other room may look in here.
"""
