"""Memory of a rank: activations of a block by kind, microbatches in flight, and state under ZeRO, term by term.

    activations        ──┐
    in_flight_formulas ──┼──▶ terms of a rank ──▶ ranks: for many strategies, by kind of rank
    state              ──┘

Imports `descriptions`, and from `prediction` columns, stages and the pipeline's orders of computation.
"""
