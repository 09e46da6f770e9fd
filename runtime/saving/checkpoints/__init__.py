"""Checkpoints of a job: a folder that belongs to one run, with steps that are complete or absent.

`save_and_load_checkpoints` saves and loads; `manifest` describes a checkpoint's files; `background_saves` writes while
training goes on; `folder_owner` takes the folder for one run, `atomic_run_folder` lists and replaces its steps. Imports
the rest of `saving`, and what is below it.
"""
