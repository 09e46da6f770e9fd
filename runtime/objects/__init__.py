"""What users' code and objects reach: looked through, watched, compared and put back here alone.

`user_code` tells users' code, `code_digest` digests it; `plain_code` hears what code asks elsewhere; `spaces` says
where things keep others; `snapshot` finds all that is reached, and undoes what code has changed; `host_state` and
`steering` watch what code goes by; `distances` says how far two runs are apart. Imports nothing of the runtime.
"""
