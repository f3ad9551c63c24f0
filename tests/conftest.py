"""Settings of every test."""

from hypothesis import settings

# Time is no property of ours: a busy machine must not fail a test.
settings.register_profile("upcycle", deadline=None)
settings.load_profile("upcycle")
