"""What a rank holds: activations of a block by kind, microbatches in flight, and state under ZeRO, term by term.

    activations ─┐
    in_flight  ──┼──▶ terms of a rank ──▶ ranks: of many strategies, kind of rank by kind of rank
    state      ──┘

Imports `descriptions`, and of `prediction` columns, stages and orders of computation.
"""
