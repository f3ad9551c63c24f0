"""Carry out a plan: merge heads, calibrate and refine on text, predict the cost, verify."""
