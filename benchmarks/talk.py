"""The conversations of the benchmarks: a scripted user whose replies have different lengths."""

from __future__ import annotations

from lightning_mtrl.environments.protocol import Observation, Transition

SYSTEM = "You are a helpful assistant. Ask what you need to know before you answer."
OPENERS = (
    "I want to spend a weekend in the mountains with two children and little money. Where should I begin?",
    "Since Monday my computer takes ten minutes to start. What can I do?",
    "Write a few lines about the history of coffee for a school magazine, please.",
    "I have never cooked. What could I make tonight with eggs and potatoes?",
    "How does a bank work out the interest on my savings?",
    "Tomorrow I have to give a talk and I am already nervous. Any advice?",
    "What grows on a balcony that sees the sun for an hour a day?",
    "My bicycle has a flat tyre. How do I mend it?",
)
REPLIES = (
    "Can you say that again in simpler words?",
    "I see, but I doubt that this works for me. What would change with one hour a week for it?",
    "Yes.",
    "Somebody told me to do that last year and nothing came of it. Give me an example with numbers, please.",
    "All right. And after that?",
)


class Talk:
    """Answers with the same replies in the same order, whatever the assistant says.

    Args:
        turns: responses after which the conversation ends; its outcome is 1 for an even seed.
    """

    def __init__(self, turns: int = 5) -> None:
        self.turns = turns

    def reset(self, seed: int) -> Observation:
        self.seed, self.turn = seed, 0
        return Observation(OPENERS[seed % len(OPENERS)], system=SYSTEM)

    def step(self, response: str | None) -> Transition:
        self.turn += 1
        over = self.turn == self.turns
        reply = "" if over else REPLIES[(self.seed + self.turn) % len(REPLIES)]
        return Transition(reply, reward=float(over and self.seed % 2 == 0), terminated=over)
