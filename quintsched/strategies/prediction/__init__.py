"""Prediction of step time and memory, before anything runs.

    model + strategy ──▶ operators of a block ──▶ their times on the hardware ──▶ stages ──▶ the pipeline ──▶ a step
                    └──▶ activations of a block, weights, gradients, optimizer state ──▶ the rank with the peak

Imports `descriptions`, `profiles`, and for `--simulate` the compiler and the simulator.
"""
