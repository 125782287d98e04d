"""The one exception of the exporter."""


class ExportError(Exception):
    """What was wrong, with which value, and what to do about it."""
