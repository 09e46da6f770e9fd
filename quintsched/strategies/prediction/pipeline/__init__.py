"""Time of the pipeline of a step, for many strategies at once.

    formula_bound_or_simulation ──┬──▶ closed_forms ──▶ runs_of_equal_ranks           and sums over ranks
                                  └──▶ simulated_makespans ──▶ event_graph_levels     any schedule, or a bound

`formula_bound_or_simulation` chooses for each row of a table. Imports `prediction`'s records of tables, blocks and
stages, schedules and passes.
"""
