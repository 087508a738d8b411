"""Which attributes of an object are read before they are written, so that their old value matters."""

from __future__ import annotations

from typing import Any


class AttributeAccess:
    """Notes the first access to each attribute of the watched objects, once :attr:`active`."""

    def __init__(self) -> None:
        self.active = False
        self._first: dict[tuple[str, str], str] = {}
        self._watched: dict[int, tuple[str, Any]] = {}  # holds the object, so that its id is not reused

    def watch(self, watched: Any, label: str) -> None:
        """Watch an object; all attributes of one whose class cannot be replaced count as read."""
        try:
            watched.__class__ = self._noting(type(watched))
        except TypeError:
            return
        self._watched[id(watched)] = (label, watched)

    def is_read_first(self, label: str, attribute: str) -> bool:
        """Return whether the old value of an attribute was, or may have been, read."""
        known = any(label == of_watched for of_watched, _ in self._watched.values())
        return not known or self._first.get((label, attribute)) == "read"

    def note(self, watched: Any, attribute: str, access: str) -> None:
        """Note an access, ``"read"`` or ``"write"``."""
        if self.active and id(watched) in self._watched:
            label, _ = self._watched[id(watched)]
            self._first.setdefault((label, attribute), access)

    def _noting(self, of: type) -> type:
        access = self
        get: Any = of.__getattribute__
        put: Any = of.__setattr__

        def read(self: Any, name: str) -> Any:
            access.note(self, name, "read")
            return get(self, name)

        def write(self: Any, name: str, value: Any) -> None:
            access.note(self, name, "write")
            put(self, name, value)

        names = {"__module__": of.__module__, "__qualname__": of.__qualname__}
        return type(of.__name__, (of,), {"__getattribute__": read, "__setattr__": write, **names})
