"""What a program registered itself: the table behind ``register`` and ``override``."""

from __future__ import annotations

from polyattn.registry.discovery import Candidate
from polyattn.registry.once import TableLock


class Registrations:
    """Claims to names made in code, at most one registered for each name, and overrides stacked above it."""

    def __init__(self) -> None:
        self._lock = TableLock()
        self._registered: dict[str, Candidate] = {}
        self._overrides: dict[str, list[Candidate]] = {}

    def active(self) -> list[Candidate]:
        """What each name means that was registered or is overridden."""
        with self._lock:
            return [self._stack(name)[-1] for name in {**self._registered, **self._overrides}]

    def top(self, name: str) -> Candidate | None:
        """What ``name`` means, if it was registered or is overridden."""
        with self._lock:
            stack = self._stack(name)
            return stack[-1] if stack else None

    def registered(self, name: str) -> Candidate | None:
        """What was registered as ``name``, overridden or not."""
        return self._registered.get(name)

    def register(self, claim: Candidate, *, replace: bool) -> list[Candidate]:
        """Make ``claim`` the registration of its name, unless there is one that it may not replace.

        Returns:
            The registration in the way, if any.
        """
        with self._lock:
            if claim.name in self._registered and not replace:
                return [self._registered[claim.name]]
            self._registered[claim.name] = claim
            return []

    def withdraw(self, claim: Candidate, before: Candidate | None) -> None:
        """Put ``before`` in the place of ``claim``, unless another claim took it meanwhile."""
        with self._lock:
            if self._registered.get(claim.name) is claim:
                del self._registered[claim.name]
                if before is not None:
                    self._registered[claim.name] = before

    def push(self, claim: Candidate) -> None:
        """Let ``claim`` override what its name means."""
        with self._lock:
            self._overrides.setdefault(claim.name, []).append(claim)

    def pop(self, claim: Candidate) -> None:
        """End the override ``claim``; another thread's may have begun later and end later."""
        with self._lock:
            self._overrides[claim.name].remove(claim)
            if not self._overrides[claim.name]:
                del self._overrides[claim.name]

    def _stack(self, name: str) -> list[Candidate]:
        return [*([self._registered[name]] if name in self._registered else ()), *self._overrides.get(name, ())]
