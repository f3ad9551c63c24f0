"""Exact counts of what attention caches, moves and computes, and the requests that fit."""
