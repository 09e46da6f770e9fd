"""Event graph of a plan: instructions merged into events, the dependencies between them, and orders of execution.

`events_and_channels` merges sends with receives and collectives with their peers, `transport_ordering_rules` assigns
events to the queues of a transport, `event_edges` derives the dependencies, `event_graph` runs the graph or finds its
cycle; `blocking_transport` decides the strictest profile in one walk. Imports `ir`; proofs, passes and the simulator
use it.
"""
