"""A run as data: the strict schema and its readers."""
