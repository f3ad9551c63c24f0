"""A checkpoint as a program of Core ML or Core AI that never repeats K and V."""
