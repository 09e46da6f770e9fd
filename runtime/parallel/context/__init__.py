"""Context parallelism: attention over a sequence whose slices lie on the ranks of cp (ring, gather, swap)."""
