"""Prediction of step time and memory before a run, and search for the best strategy; without torch.

    commands      quintsched predict, tune, calibrate
    tuning        search for the best strategies, a certificate of all that was left out, and files to run them
    prediction    operators ▶ blocks ▶ stages ▶ a step: its time, and what the fullest rank holds
    profiles      measured times of several sources in one form
    descriptions  models, hardware and strategies as data, with presets

A package imports those below it in this list, and any of the compiler's; of the compiler, only `cli` imports this one.
"""
