"""What a step costs before anything runs, and which strategy is best: a package beside the compiler, without torch.

    commands      quintsched predict, tune, calibrate
    tuning        the best strategies, a certificate of what was left out, and the files that run them
    prediction    operators ▶ blocks ▶ stages ▶ a step: its time, and what the fullest rank holds
    profiles      measured times in one form, whoever measured them
    descriptions  models, hardware and strategies as data, with presets

A room imports those below it here, and any of the compiler's; of those, only the list of commands knows this package.
"""
