"""Time of the pipeline of a step, for many strategies at once.

    pipeline_times ──▶ makespan ──┬──▶ closed_forms ──▶ runs_of_equal_ranks     and sums over ranks
                                  └──▶ event_graph_levels                       any schedule, by simulation

`makespan` is the interface; `formula_bound_or_simulation` applies it to the rows of a table. Imports `prediction`'s
records of tables, blocks and stages, schedules and passes.
"""
