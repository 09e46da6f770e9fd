"""Rendezvous of the ranks of a run, and its exposure to the network: the store, the attempt, the interface.

`rendezvous_store` opens or serves torch's key-value store, and lets the ranks of one attempt meet, whatever earlier
attempts have left in it; `network_addresses` chooses listening addresses and interfaces, and resolves the first
machine's address, without torch; `fork_server` starts ranks, `end_with_parent` ends a rank with its launcher. Imports
the clock of `watch` alone.
"""
