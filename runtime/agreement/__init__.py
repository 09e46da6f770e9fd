"""Settings that describe a run, by name: compared between ranks, saved in checkpoints, compared again on resume.

`sections` finds the ranks whose settings differ, `run_records` has the settings of a job, `engine_records` those of an
engine, `kept_settings` the settings that may change when a run resumes. Imports `comm` and `settings`.
"""
