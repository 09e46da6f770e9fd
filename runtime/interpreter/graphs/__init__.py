"""Training steps that run from graphs of the device. Imports the interpreter's other files, and rooms below.

step_graphs      which steps have a graph, and when it is captured anew
captured_step    one of them: captured, replayed, compared with its instructions
static_batch     the memory that the batch of a captured step is copied to
"""
