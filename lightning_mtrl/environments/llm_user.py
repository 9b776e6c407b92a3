"""A user played by a language model, with a goal of its own that the agent has to find out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from lightning_mtrl.conversation import Message
from lightning_mtrl.environments.llm_judges import OutcomeJudge
from lightning_mtrl.environments.protocol import Observation, Transition
from lightning_mtrl.environments.scenarios import Scenario, Scenarios
from lightning_mtrl.llm.client import ChatClient
from lightning_mtrl.llm.server import Server

END_MARK = "[END]"
PARTING = "Thank you, goodbye."

_PLAY = """You play a person who talks with an assistant. You are never the assistant yourself.

{goal}

How you talk:
- One short message in plain words, as people type them, answering what the assistant said last.
- You are not an expert. Do not solve the task, and do not volunteer what you were not asked for.
- If you are asked for something that you know, tell it. If you do not know it, say so.
- If the assistant goes on without asking for what it needs, say what is not right yet, but not why.
- When the assistant has given what you wanted, or you see that it will not, write {mark} and nothing else."""


class LLMUser:
    """CollabLLM's setting: a model plays a user with a hidden goal, and a judge gives the outcome at the end.

    The user ends the conversation, at the latest after `max_turns` responses; then the judge scores it. If
    the model or the judge gives nothing usable after all attempts, the conversation has no outcome and is
    dropped. The last transition's info has "outcome" and "tokens" (words of all messages after the request).

    Args:
        server: the model that plays the user.
        scenarios: where users come from: `TaskScenarios` or `FileScenarios`.
        judge: gives the outcome: `AccuracyJudge`, `DocumentJudge`, `DiagnosisJudge`, or one of your own.
        max_turns: responses after which the user leaves.
        system: the agent's system message; null is the scenario's own.

    Source: CollabLLM (arXiv:2502.00640), in whose manner ITPO (arXiv:2603.23550) collects. The prompts are
    ours.
    """

    def __init__(
        self,
        server: Server,
        scenarios: Scenarios,
        judge: OutcomeJudge,
        max_turns: int = 5,
        system: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        self.client = ChatClient(server)
        self.scenarios, self.judge, self.max_turns, self.system = scenarios, judge, max_turns, system

    def held_out(self) -> Self:
        """The same with the users that the scenarios keep to validate on, if they do."""
        made, kept = copy.copy(self), getattr(self.scenarios, "held_out", None)
        made.scenarios = self.scenarios if kept is None else kept()
        return made

    def reset(self, seed: int) -> Observation:
        """Draw a user, who says the request."""
        self._seed = seed
        self._scenario: Scenario = self.scenarios.draw(seed)
        self._talk = [Message("user", self._scenario.request)]
        self._turn = 0
        system = self._scenario.instructions if self.system is None else self.system
        facts = {"goal": self._scenario.goal, "reference": self._scenario.reference}
        return Observation(self._scenario.request, system, info=facts)

    async def step(self, response: str | None) -> Transition:
        """Let the user answer; after the last answer, let the judge score.

        Raises:
            LLMFailure: if model or judge give nothing usable.
        """
        self._turn += 1
        self._talk.append(Message("assistant", response or ""))
        if self._turn == self.max_turns:
            return await self._end(PARTING)
        said = (await self.client.chat(self._played(), self._seed)).strip()
        if END_MARK in said:
            return await self._end(said.replace(END_MARK, "").strip() or PARTING)
        self._talk.append(Message("user", said))
        return Transition(said)

    async def _end(self, parting: str) -> Transition:
        outcome = float(await self.judge.score(self._scenario, self._talk))
        self._talk.append(Message("user", parting))
        words = sum(len(message.content.split()) for message in self._talk[1:])
        return Transition(parting, outcome, terminated=True, info={"outcome": outcome, "tokens": words})

    def _played(self) -> list[Mapping[str, Any]]:
        """The conversation from the user's side: what the agent said is what the model hears."""
        play = _PLAY.format(goal=self._scenario.goal, mark=END_MARK)
        # Models are made to answer users, so the request opens as their own words to an invitation.
        messages: list[Mapping[str, Any]] = [
            {"role": "system", "content": play},
            {"role": "user", "content": "Hello, what can I do for you?"},
        ]
        for message in self._talk:
            role = "assistant" if message.role == "user" else "user"
            messages.append({"role": role, "content": message.content or "(says nothing)"})
        return messages
