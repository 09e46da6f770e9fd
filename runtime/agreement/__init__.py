"""Settings that describe a run, by name: compared between ranks, saved in checkpoints, compared again on resume.

`refuse_unequal_ranks` finds the ranks whose settings differ, `job_fingerprint_between_ranks` has the settings of a
job, `engine_settings_between_ranks` those of an engine, `settings_on_resume` the settings that may change when a run
resumes. Imports `comm` and `settings`.
"""
