"""Inspection of user code and Python objects: walks, snapshots, change detection and restoring, for all of the runtime.

`library_or_user` tells user code from library code, `code_digest` digests it; `find_impure_code` lists calls whose
results code cannot determine; `object_contents` has the places where objects hold others; `snapshot` saves and
restores host state; `host_state`, `changes_since_split` and `control_flow_state` detect changes of it between steps;
`tensor_distances` compares tensors. Imports the torch modes of `comm` alone.
"""
