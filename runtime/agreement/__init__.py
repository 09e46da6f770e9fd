"""What a run is, as settings with names: compared between ranks, kept in checkpoints, compared again.

`sections` say who differs in what, `records` has the settings of a job, `engine_records` what an engine knows of
itself, `kept_settings` what may change as a run goes on. Imports `comm` and `settings`.
"""
