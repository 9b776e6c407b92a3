"""Score logged conversations: the value of each response by a run's critic, in `metadata.turn_values`.

For Iterative PPO that is Q, the expected return after the response. The file is read, scored and written as a
stream. Records that cannot be read are left out, counted and shown. The output is a log of our own form: keys
of a record that are not a conversation's are not carried over, and what a tool said is the user's.

With a credit that scales by the whole batch (`prescale` batch_max, `aggregate` mean_scaled) rewards are on
the scale of the 256 conversations scored together: compare those of one file with care, and not of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mtrl.command_logs import add_log_options
from lightning_mtrl.command_paths import add_run_options, log_output, open_run
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import command_parser, load_config, parse
from lightning_mtrl.rollouts.log_files import expect_logs
from lightning_mtrl.runs.folder import RunFolder

if TYPE_CHECKING:
    from lightning_mtrl.assembly import Learner
    from lightning_mtrl.conversation import Conversation
    from lightning_mtrl.rollouts.logs import LoadedLogs

SCORED_TOGETHER = 256  # conversations


def main(arguments: Sequence[str]) -> None:
    """Run the command; `arguments` are those after its name."""
    parser = command_parser("score", __doc__ or "")
    add_run_options(parser)
    add_log_options(parser)
    parser.add_argument(
        "--output", type=str, required=True, help="a .jsonl or .parquet file; replaced if there"
    )
    options = parse(parser, arguments)
    output, folder = log_output(options.output), open_run(options)
    expect_logs(options.logs)
    if output.resolve() == Path(options.logs).resolve():
        raise UserError(f"--output is {str(output)!r}, the file that is read. Pass another one.")
    from lightning_mtrl.readiness import expect_ready
    from lightning_mtrl.recorder import load_learner
    from lightning_mtrl.rollouts.log_records import Demands
    from lightning_mtrl.rollouts.log_tokens import LogEncoder
    from lightning_mtrl.rollouts.logs import LoadedLogs, stream_conversations, write_conversations

    _expect_critic(folder)
    expect_ready(load_config(folder.config, environment=False), "logs")
    run = load_learner(folder, options.iteration)
    learner = run.parts
    loaded, demands = LoadedLogs(), Demands(join_consecutive=options.join_consecutive)
    encoder = LogEncoder(learner.context.chat, learner.context.context_length)
    found = stream_conversations(options.logs, loaded, options.strict, demands, options.outcomes, encoder)
    unknown = Counter[str]()
    write_conversations(output, scored(noted(found, unknown, loaded), learner))
    without = f", {unknown['no outcome']} without an outcome" if unknown["no outcome"] else ""
    print(f"{loaded.counts()}{without}; values by the critic of policy {run.iteration} in {output}")


def noted(
    conversations: Iterator[Conversation], unknown: Counter[str], loaded: LoadedLogs
) -> Iterator[Conversation]:
    """The conversations as they pass, and in `unknown` how many of them have no outcome.

    Raises:
        UserError: if there is none, so that nothing is written.
    """
    from lightning_mtrl.rollouts.usable import expect_any

    for conversation in conversations:
        unknown["no outcome"] += conversation.outcome is None
        yield conversation
    expect_any(loaded)


def scored(conversations: Iterator[Conversation], learner: Learner) -> Iterator[Conversation]:
    """Each conversation with the values of its responses in `metadata["turn_values"]`.

    Raises:
        UserError: if the algorithm gives no values.
    """
    while chunk := list(islice(conversations, SCORED_TOGETHER)):
        values = learner.algorithm.turn_values(chunk)
        if values is None:
            name = type(learner.algorithm).__name__
            raise UserError(f"algorithm is {name}, which has no value for a response. Give --run of another.")
        for conversation, of_turns in zip(chunk, values, strict=True):
            metadata = {**conversation.metadata, "turn_values": of_turns}
            yield replace(_as_logged(conversation), metadata=metadata)


def _as_logged(conversation: Conversation) -> Conversation:
    """Without ids that only this command gave it: a policy's own come with their log-probabilities."""
    if any(turn.behaviour_logprobs for turn in conversation.turns):
        return conversation
    turns = tuple(replace(turn, response_ids=(), observation_ids=()) for turn in conversation.turns)
    return replace(conversation, prompt_ids=(), turns=turns)


def _expect_critic(folder: RunFolder) -> None:
    from lightning_mtrl.runs.checkpoint import latest_checkpoint

    if latest_checkpoint(folder) is None:
        raise UserError(
            f"--run is {str(folder.path)!r}, which has learned nothing yet, so there is no critic to score "
            f"with. Finish an iteration of it, or run `evaluate` on logs."
        )
