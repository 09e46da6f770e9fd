"""What a run is, as settings with names: compared between ranks, kept in checkpoints, compared again.

`comparison` says who differs in what, `records` has the settings of a job, `engine_records` what an engine knows of
itself, `resuming` what may change as a run goes on. Imports `comm` and `settings`.
"""
