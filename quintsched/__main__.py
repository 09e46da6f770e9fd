"""`python -m quintsched`: the command line, as `quintsched` starts it."""

from quintsched.cli import main

if __name__ == "__main__":
    main()
