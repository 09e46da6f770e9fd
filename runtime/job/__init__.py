"""The job file: what is trained, on what and how, as frozen settings read from YAML.

`jobfile` reads it, `config` has every setting, `choices` the names to choose from, `settings` the base of all settings.
The lowest room: imports neither torch nor anything else of the runtime, so that a job that does not fit is refused at
once.
"""
