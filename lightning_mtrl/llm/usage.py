"""What language models were asked for, and what that took."""

from __future__ import annotations

from dataclasses import dataclass, fields

_COUNTS = ("requests", "recorded", "retries", "failures", "prompt_tokens", "sampled_tokens")


@dataclass
class Usage:
    """What a client, or several, have used so far.

    Attributes:
        requests: attempts that went to the server.
        recorded: replies that came out of the record instead.
        retries: attempts after a failed one.
        failures: requests that stayed without a usable reply.
        prompt_tokens: as the server counts them.
        sampled_tokens: of its replies.
        cost: of both, at the prices of the `Server`.
        priced: whether there are prices.
    """

    requests: int = 0
    recorded: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    priced: bool = False

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        """Both together; with `sign` -1 what this is more than an earlier one."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        found = {name: one + sign * two for name, one, two in pairs if name != "priced"}
        return Usage(**found, priced=self.priced or other.priced)

    def figures(self) -> dict[str, float]:
        """The numbers by name; none where nothing was asked, and the cost only where there are prices."""
        if not self.requests + self.recorded:
            return {}
        counts = {name: float(getattr(self, name)) for name in _COUNTS}
        return counts | ({"cost": self.cost} if self.priced else {})


class Meter:
    """Adds up what all clients of a process have used, also those that are gone."""

    def __init__(self) -> None:
        self._clients: list[Usage] = []

    def add(self, usage: Usage) -> None:
        """Count a client's usage, now and as it grows."""
        self._clients.append(usage)

    def total(self) -> Usage:
        """What all of them have used so far."""
        total = Usage()
        for usage in self._clients:
            total = total.plus(usage)
        return total


METER = Meter()
