"""The one version string."""

__version__ = "1.0.0.dev0"
