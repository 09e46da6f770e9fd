"""Time of the pipeline of a step, for many strategies at once.

    spans ──▶ makespan ──┬──▶ closed_forms ──▶ runs      runs of equal ranks, and sums over ranks
                         └──▶ levels                     any schedule, by simulation

`makespan` is the interface; `spans` applies it to the rows of a table. Imports `prediction`'s records of tables, blocks
and stages, schedules and passes.
"""
