"""How the ranks of a run find each other, and who else could: the store, the attempt, the network interface.

`store` opens or serves torch's key-value store; `attempt` lets the ranks that run now meet, whatever an attempt before
has left in it; `addresses` says where one listens, and which interface the libraries use, without torch; `master` looks
up the first machine's address; `parent` lets a rank end with its launcher. Imports nothing of the runtime.
"""
