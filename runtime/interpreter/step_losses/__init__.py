"""Losses and metrics of steps: observed on each rank, agreed on by all ranks, summed over them.

`observe_losses` ─▶ `exchanged_loss_findings` ─▶ `agree_on_loss_units`: what losses are means over.
`sum_losses_across_ranks`: their numbers, from microbatches to the result of a step.

Of `interpreter`, imports `instruction_state` alone, which imports `sum_losses_across_ranks`.
"""
