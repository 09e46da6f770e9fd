"""Generator of the reference: `make reference` writes the pages of `docs/reference` from the code itself.

    job.py          job.md, job.schema.json     from the settings' types, defaults and descriptions
    commands.py     commands.md                 from the command line
    api.py          api.md                      from the public names: signatures and docstrings
    exit_codes.py   exit-codes.md               from the exception classes
    pages.py        all of them; `tests/test_reference.py` compares them with the committed files

Each page lists names that have no description; a test fails for one. Imports all of the package.
"""
