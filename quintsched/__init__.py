"""quintsched."""
