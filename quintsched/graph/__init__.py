"""The event graph: a plan's instructions as events, what each of them waits for, and who runs when.

`plan_events` merges sends with receives and collectives with their peers, `profiles` says which of them share a queue
on a transport, `edges` what each event waits for, `event_graph` runs the graph or finds its cycle; `rendezvous` decides
the strictest profile in one walk. Imports `ir`; proofs, passes and the simulator use it.
"""
