"""What a rank holds: activations of a block by kind, microbatches in flight, and state under ZeRO, term by term.

`terms` adds up what the others know. Imports `descriptions` and `schedules`, nothing of the rest of `prediction`.
"""
