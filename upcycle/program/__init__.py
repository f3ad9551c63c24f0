"""A Core ML program as data: read, count, lint and describe it without its weights."""
