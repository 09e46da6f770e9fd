"""The event graph: a plan's instructions as events, what each of them waits for, and who runs when.

`plan_events` merges sends with receives and collectives with their peers, `profiles` says which of them share a queue
on a transport, `event_graph` runs the graph or finds its cycle. Imports `ir`; proofs, passes and the simulator use it.
"""
