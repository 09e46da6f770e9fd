"""The job file: what is trained, on what and how, as frozen settings read from YAML.

Imports no torch and nothing else of the runtime, so that a job that does not fit is refused at once.
"""
