"""A decoder as a Core AI asset."""
