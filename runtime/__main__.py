"""`torchrun -m quintsched.runtime`: see `quintsched.runtime.launch.worker`."""

from .launch.worker import leave, main

if __name__ == "__main__":
    leave(main())
