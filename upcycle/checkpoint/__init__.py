"""A checkpoint folder as data."""
