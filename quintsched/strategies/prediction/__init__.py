"""How long a step takes and what it holds, worked out before anything runs.

    model + strategy ──▶ operators of a block ──▶ their times on the hardware ──▶ stages ──▶ the pipeline ──▶ a step
                    └──▶ what a block keeps, weights, gradients, optimizer state ──▶ the fullest rank

Imports `descriptions`, `profiles`, and for `--simulate` the compiler and the simulator.
"""
