"""How fast this machine is, measured: what `quintsched calibrate` writes into a description of hardware.

`operations` times what a rank computes, `links` what ranks say to each other and how they share the cores, in
processes, `machine` puts it all into one description. Imports `comm`; nothing imports this room.
"""
