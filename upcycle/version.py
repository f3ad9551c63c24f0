"""The version of this package, which manifests and reports name."""

__version__ = "0.1.0"
