r"""Make a first policy that plays a game by random legal moves, and knows nothing else of it.

    python examples/textarena_game/warm_start.py --config examples/textarena_game/game.yaml \
        --moves accept continue --output runs/secretary/pi_0

The embedded model has never seen a game and would hardly ever say a legal move. This trains all its weights
by maximum likelihood on games that are played by drawing one of the moves at random, whatever the game said,
so nothing about good play is taught. It learns the moves, and what the game says at the end: that is how it
comes to read what the game said before. The output is a model for `fit --model.name`. The moves have to be
legal in every state of the game; for a game where they are not, write another `play`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lightning_mtrl import Conversation, Environment, Policy, Turn
from lightning_mtrl.assembly import build_backbone
from lightning_mtrl.batch import collate
from lightning_mtrl.conversation import Message
from lightning_mtrl.models.saving import save_role
from lightning_mtrl.models.tiny import tiny_model_of
from lightning_mtrl.parsing import build_environment, load_config
from lightning_mtrl.rollouts.tokens import ChatTokenizer

FIRST_GAME = 2_000_000  # seed of the first game with --seed 0


def play(environment: Environment, moves: Sequence[str], seed: int) -> Conversation:
    """One game of random legal moves.

    Raises:
        ValueError: if one of them was not legal.
    """
    # A stream of its own: the game's luck has the same seed, and the moves must not depend on it.
    rng, turns = random.Random(f"moves of game {seed}"), []
    first = environment.reset(seed)
    while True:
        move = rng.choice(moves)
        answer = environment.step(move)
        turns.append(Turn(move, answer.observation, answer.reward))
        if answer.info.get("invalid_move"):
            raise ValueError(f"the game took {move!r} for an illegal move: {answer.info.get('reason')}")
        if answer.terminated:
            return Conversation(str(seed), (Message("user", first.text),), tuple(turns), answer.reward)


def imitate(policy: Policy, chat: ChatTokenizer, games: Sequence[Conversation], batch_size: int) -> float:
    """One pass over the games, in order; returns the mean loss of the last ten steps, in nats a token.

    The loss is a mean over the tokens of the moves and of the game's last message. What the game says in
    between is luck that nobody can predict, and left out.
    """
    optimizer, losses = policy.configure_optimizers(), []
    encoded = list(chat.encode_all(games))
    starts = range(0, len(encoded), batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, policy.learning_rate, len(starts))
    policy.train()
    for start in starts:
        batch = collate(encoded[start : start + batch_size], chat.pad_id, chat.header_ids)
        ending = batch.attention_mask & (batch.position_ids > batch.turn_end.amax(1, keepdim=True))
        batch = replace(batch, response_mask=batch.response_mask | ending)
        loss = -policy.logprobs(batch).sum() / batch.response_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.own_parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def main() -> None:
    """Play, imitate, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="of the run; its environment and model are used"
    )
    parser.add_argument("--moves", nargs="+", required=True, help="what the policy may say in every state")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model; new or empty")
    parser.add_argument("--games", type=int, default=16_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the games and the moves")
    options = parser.parse_args()
    config = load_config(options.config, overrides=["--model.name=tiny", "--model.fine_tuning=full"])
    environment = build_environment(config)
    backbone, chat = build_backbone(config.model, tiny_model_of(environment))
    first = FIRST_GAME + options.seed * options.games
    games = [play(environment, options.moves, first + number) for number in range(options.games)]
    won = sum(game.outcome or 0.0 for game in games) / len(games)
    loss = imitate(Policy(backbone, learning_rate=options.learning_rate), chat, games, options.batch_size)
    options.output.mkdir(parents=True, exist_ok=True)
    save_role(backbone, "policy", options.output)
    chat.tokenizer.save_pretrained(options.output)
    print(
        f"{options.output}: random legal play has a mean outcome of {won:.3f}; loss {loss:.3f} nats a token"
    )


if __name__ == "__main__":
    main()
