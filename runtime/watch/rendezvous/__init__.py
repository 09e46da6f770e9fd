"""How the ranks of a run find each other, and who else could: the store, the attempt, the network interface.

`store` opens or serves torch's key-value store, and lets the ranks that run now meet, whatever an attempt before has
left in it; `addresses` says where one listens, which interface the libraries use, and where the first machine is,
without torch; `parent` lets a rank end with its launcher. Imports nothing of the runtime.
"""
