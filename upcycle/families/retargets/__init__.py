"""Exact rules from classes without grouped KV heads onto classes that have them."""
