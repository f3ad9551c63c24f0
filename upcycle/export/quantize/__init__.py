"""Compressed weights: what is stored how, the numbers that remain, and the package's constants."""
