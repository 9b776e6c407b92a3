"""Talk with a policy of a run: you are the user, a line is a message.

/reset begins a new conversation, and /quit, the end of the input or Ctrl-C ends. The instructions of the
run's environment, where it gives any, are the system message. With a Q-critic in the run, Q follows each
response: the return that it expects after it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import TYPE_CHECKING
from unicodedata import category

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeFloat, PositiveInt

from lightning_mtrl.command_paths import Seed, add_run_options, open_run
from lightning_mtrl.parsing import command_parser, load_config, parse

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from lightning_mtrl.assembly import Parts
    from lightning_mtrl.recorder import Run
    from lightning_mtrl.rollouts.dialogue import Answer, Dialogue

RESET, QUIT = "/reset", "/quit"


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    options = parse(_parser(), arguments)
    folder = open_run(options)
    from lightning_mtrl.readiness import expect_ready
    from lightning_mtrl.recorder import load_run

    expect_ready(load_config(folder.config), "chat")
    run = load_run(folder, options.iteration)
    dialogue = _dialogue(run, options)
    print(f"Policy {run.iteration} of {folder.path}. {RESET} begins a new conversation, {QUIT} ends.")
    try:
        for line in _lines():
            _take(line, dialogue, run)
    except KeyboardInterrupt:
        print()


def _take(line: str, dialogue: Dialogue, run: Run[Parts]) -> None:
    """Do what a line asks for."""
    if line == RESET:
        dialogue.reset()
        print("(A new conversation.)")
    elif line.startswith("/"):
        print(f"({line.split()[0]} is not known; there are {RESET} and {QUIT}.)")
    elif line:
        _answer(line, dialogue, run)


def _answer(text: str, dialogue: Dialogue, run: Run[Parts]) -> None:
    # The adapter is merged for the response alone: the critic must not read with the policy's weights.
    with run.parts.backbone.sampling("policy"):
        answer = _responded(text, dialogue, run.parts.context.context_length)
    if answer is not None:
        print(f"policy: {_shown(answer)}{_value(dialogue, run)}", flush=True)


def _responded(text: str, dialogue: Dialogue, context_length: int) -> Answer | None:
    """The response, in a new conversation where the context is full; None where any would be too short."""
    if not dialogue.fits(text):
        print(f"(Not read: with a response this does not fit the context of {context_length} tokens.)")
        return None
    if not dialogue.has_room(text):
        print(f"(The context of {context_length} tokens is full; a new conversation begins.)")
        dialogue.reset()
    return dialogue.respond(text)


def _shown(answer: Answer) -> str:
    """The response without what would steer a terminal."""
    text = "(abstains)" if answer.text is None else answer.text
    kept = "".join("\N{REPLACEMENT CHARACTER}" if _steers(sign) else sign for sign in text)
    return kept if answer.finished else f"{kept} (cut off)"


def _steers(sign: str) -> bool:
    return sign not in "\n\t" and category(sign) == "Cc"


def _value(dialogue: Dialogue, run: Run[Parts]) -> str:
    """Q of the last response; empty where there is none, and of pi_0, whose critic has learned nothing."""
    algorithm = run.parts.algorithm
    values = algorithm.turn_values([dialogue.conversation]) if run.iteration else None
    if values is None or math.isnan(values[0][-1]):
        return ""
    return f"  ({algorithm.turn_value_name} {values[0][-1]:z.2f})"


def _lines() -> Iterator[str]:
    """What is typed, line by line, up to the end or /quit; also where the input is no terminal."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    asked = sys.stdin.isatty()
    while True:
        if asked:
            print("you: ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == QUIT:
            if asked and not line:
                print()
            return
        yield line.encode("utf-8", "replace").decode("utf-8").strip()


def _dialogue(run: Run[Parts], options: Namespace) -> Dialogue:
    from lightning_mtrl.rollouts.dialogue import Dialogue

    context = run.parts.context
    given = {
        "temperature": options.temperature,
        "max_response_tokens": options.max_response_tokens,
    }
    sampling = replace(context.sampling, **{key: value for key, value in given.items() if value is not None})
    system = _instructions(run, options.seed or 0)
    if system:
        print(f"system: {system}")
    with run.parts.backbone.sampling("policy") as model:
        return Dialogue(
            model,
            context.chat,
            sampling=sampling,
            context_length=context.context_length,
            seed=options.seed,
            system=system,
        )


def _instructions(run: Run[Parts], seed: int) -> str | None:
    """What the environment tells the policy to do; one that may ask others for it is not asked."""
    environment = run.parts.environment
    if inspect.iscoroutinefunction(environment.reset):
        return run.parts.context.chat.system_prompt
    return environment.reset(seed).system or run.parts.context.chat.system_prompt


def _parser() -> ArgumentParser:
    parser = command_parser("chat", __doc__ or "")
    add_run_options(parser)
    parser.add_argument(
        "--temperature",
        type=NonNegativeFloat | None,
        help="0 is greedy; null: as in the run",
    )
    parser.add_argument(
        "--max_response_tokens", type=PositiveInt | None, help="longest response; null: as in the run"
    )
    parser.add_argument("--seed", type=Seed | None, help="repeats a chat; null: other responses each time")
    return parser
