"""How long the pipeline of a step takes: many strategies at once.

    spans ──▶ makespan ──┬──▶ closed_forms ──▶ runs      runs of equal ranks, and sums over ranks
                         └──▶ levels                     any schedule, simulated

`makespan` is what others ask; `spans` asks it for the rows of a table. Imports `prediction`'s records of tables, blocks
and stages, schedules and passes.
"""
