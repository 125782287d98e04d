"""Reads one object of a JSON configuration: every key is asked for by name and type, and none may be left over."""

import difflib

from .error import ExportError

_REQUIRED = object()


class Section:
    def __init__(self, where, value):
        if not isinstance(value, dict):
            raise ExportError(f"{where} is {_shown(value)}: it has to be an object with named entries")
        self.where, self.values, self.asked = where, value, []

    def path(self, key):
        return f"{self.where}.{key}"

    def _take(self, key, default):
        self.asked.append(key)
        if key in self.values:
            return self.values[key]
        if default is _REQUIRED:
            raise ExportError(f"{self.path(key)} is missing: add it")
        return default

    def integer(self, key, default=_REQUIRED, least=1, most=2**31 - 1):
        value = self._take(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ExportError(f"{self.path(key)} is {_shown(value)}: it has to be a whole number")
        if not least <= value <= most:
            raise ExportError(f"{self.path(key)} is {value}: it has to be at least {least} and at most {most}")
        return value

    def number(self, key, default=_REQUIRED, above=None):
        value = self._take(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 3e38:
            raise ExportError(f"{self.path(key)} is {_shown(value)}: it has to be a finite number in float32")
        if above is not None and value <= above:
            raise ExportError(f"{self.path(key)} is {value}: it has to be above {above}")
        return float(value)

    def flag(self, key, default=_REQUIRED):
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ExportError(f"{self.path(key)} is {_shown(value)}: it has to be true or false")
        return value

    def text(self, key, default=_REQUIRED, of=None, empty=False):
        value = self._take(key, default)
        if value is default:
            return value
        if not isinstance(value, str) or not (value or empty):
            kind = "a text" if empty else "a text that is not empty"
            raise ExportError(f"{self.path(key)} is {_shown(value)}: it has to be {kind}")
        if of is not None and value not in of:
            raise ExportError(
                f"{self.path(key)} is {_shown(value)}: it has to be one of {', '.join(of)}{_near(value, of)}"
            )
        return value

    def list(self, key, default=_REQUIRED):
        value = self._take(key, default)
        if value is not default and not isinstance(value, list):
            raise ExportError(f"{self.path(key)} is {_shown(value)}: it has to be a list")
        return value

    def section(self, key, default=_REQUIRED):
        value = self._take(key, default)
        return None if value is None and default is None else type(self)(self.path(key), value)

    def sections(self, key):
        """The entries of an object, each an object itself, in their order."""
        outer = self.section(key)
        return {name: type(self)(outer.path(name), value) for name, value in outer.values.items()}

    def done(self):
        """Refuses keys that were not read."""
        for key in self.values:
            if key not in self.asked:
                known = ", ".join(sorted(self.asked))
                near = _near(key, self.asked)
                raise ExportError(f"{self.path(key)} is not known{near}: remove it, or use one of {known}")


class Lenient(Section):
    """A configuration of transformers: null stands for the default, and keys that nothing asks for are its own affair."""

    def _take(self, key, default):
        value = super()._take(key, default)
        return default if value is None and default is not _REQUIRED else value


def _near(word, words):
    close = difflib.get_close_matches(word, words, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _shown(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
