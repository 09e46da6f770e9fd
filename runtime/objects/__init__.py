"""What users' code and objects reach: looked through, watched, compared and put back here alone.

`user_code` tells users' code from libraries', and digests it; `plain_code` hears what code asks elsewhere; `snapshot`
undoes what code has changed; `host_state` and `steering` watch what it goes by; `reachable` finds what objects consist
of. Imports nothing of the runtime.
"""
