"""A game of verifiers: guess a number, in as many turns as there are, and the sooner the better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

CLEANED: list[str] = []  # numbers of the games that were cleaned up behind
SYSTEM = "Say a number."


def load_environment(
    numbers: Sequence[int] = tuple(range(1, 21)),
    evaluation: Sequence[int] | None = None,
    rewards: Sequence[str] = ("found", "soon"),
    weights: Sequence[float] = (1.0, 0.5),
    examples: bool = False,
    row_tools: bool = False,
    **settings: Any,
) -> Any:
    """The game; `rewards` are names of functions of `scores()`."""
    import verifiers as vf
    from datasets import Dataset

    def rows(chosen: Sequence[int]) -> Any:
        made: list[dict[str, Any]] = [
            {"question": f"From {min(chosen)} on?", "answer": str(n)} for n in chosen
        ]
        if examples:
            talk = [("user", "Hello?"), ("assistant", "Hello!"), ("user", "Which?")]
            made = [{**row, "prompt": [{"role": r, "content": c} for r, c in talk]} for row in made]
        if row_tools:
            made = [{**row, "info": {"tool_defs": [_tool()]}} for row in made]
        return Dataset.from_list(made)

    class Guessing(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return answered(vf, state, messages[-1].content)

        async def get_prompt_messages(self, state: Any) -> Any:
            messages = await super().get_prompt_messages(state)
            forgets = state["trajectory"] and state["trajectory"][-1]["completion"][-1].content == "forget"
            return messages[-1:] if forgets else messages

        @vf.stop
        async def gave_up(self, state: Any) -> bool:
            turns = state["trajectory"]
            return bool(turns) and turns[-1]["completion"][-1].content == "I give up"

        async def cleanup(self, state: Any, **named: Any) -> None:
            CLEANED.append(state["answer"])
            await super().cleanup(state, **named)

    rubric = vf.Rubric(funcs=[scores()[name] for name in rewards], weights=list(weights[: len(rewards)]))
    kept = None if evaluation is None else rows(evaluation)
    shared = {"max_turns": 5, "system_prompt": None if examples else SYSTEM, **settings}
    return Guessing(dataset=rows(numbers), eval_dataset=kept, rubric=rubric, **shared)


def answered(vf: Any, state: Any, said: str) -> Any:
    """What the game says to a guess."""
    if said == "crash":
        raise vf.Error("the game fell over")
    if said == "tool":
        return [{"role": "tool", "tool_call_id": "1", "content": "5"}]
    if said == state["answer"]:
        state["final_env_response"] = [{"role": "user", "content": "Right!"}]
        return state["final_env_response"]
    guess = int(said) if said.isdigit() else 0
    return [{"role": "user", "content": "Higher." if guess < int(state["answer"]) else "Lower."}]


def scores() -> dict[str, Callable[..., Any]]:
    """Reward functions by name, right ones and others."""

    def found(completion: Any, answer: str) -> float:
        return float(any(message.content == answer for message in completion))

    async def soon(state: Any) -> float:
        return 1 / len(state["trajectory"])

    def raises(answer: str) -> float:
        raise ZeroDivisionError("no reward")

    async def raises_later(answer: str) -> float:
        raise ZeroDivisionError("no reward")

    def says_nothing(answer: str) -> None:
        return None

    def endless(answer: str) -> float:
        return float("inf")

    def ranks(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    return {each.__name__: each for each in (found, soon, raises, raises_later, says_nothing, endless, ranks)}


def load_with_tools() -> Any:
    """The game with a tool."""
    import verifiers as vf

    return load_environment(tool_defs=[vf.Tool(**_tool())])


def load_no_game() -> Any:
    """Something else."""
    return "a word"


def _tool() -> dict[str, Any]:
    return {"name": "peek", "description": "Tells it.", "parameters": {}}
