"""Training loop of a job file: data, losses, metrics, learning rates, logs, and when to save.

Imports the engine and everything below it; nothing but `launch` imports this room.
"""
