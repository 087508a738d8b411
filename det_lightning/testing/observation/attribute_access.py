"""Which attributes of an object are read before they are written: those whose old value matters."""

from __future__ import annotations

from typing import Any

__all__ = ["AttributeAccess"]


class AttributeAccess:
    """Notes the first access to each attribute of the objects that it watches."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}
        self._labels: dict[int, str] = {}
        self._objects: list[Any] = []
        self._active = False

    def begin(self) -> None:
        """Begin to note."""
        self._first.clear()
        self._active = True

    def watch(self, watched: Any, label: str) -> None:
        """Watch an object; one whose class cannot be exchanged counts as read."""
        try:
            watched.__class__ = self._noting(type(watched))
        except TypeError:
            return
        self._objects.append(watched)  # so that its id stays its own
        self._labels[id(watched)] = label

    def is_read_first(self, label: str, attribute: str) -> bool:
        """Tell whether the value that an attribute had was looked at, as far as that is known."""
        if label not in self._labels.values():
            return True
        return self._first.get((label, attribute)) == "read"

    def note(self, watched: Any, attribute: str, access: str) -> None:
        """Note an access."""
        if self._active:
            label = self._labels.get(id(watched))
            if label is not None:
                self._first.setdefault((label, attribute), access)

    def _noting(self, of: type) -> type:
        order = self
        get: Any = of.__getattribute__
        put: Any = of.__setattr__

        def read(self: Any, name: str) -> Any:
            order.note(self, name, "read")
            return get(self, name)

        def write(self: Any, name: str, value: Any) -> None:
            order.note(self, name, "write")
            put(self, name, value)

        members = {
            "__getattribute__": read,
            "__setattr__": write,
            "__module__": of.__module__,
            "__qualname__": of.__qualname__,
        }
        return type(of.__name__, (of,), members)
