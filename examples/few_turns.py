"""An outcome of your own: any environment, scored by a Python function of the finished conversation.

    python -m lightning_mtrl fit --config scored.yaml

in this folder, with

    environment:
      class_path: lightning_mtrl.environments.Scored
      init_args:
        environment: {class_path: number_guess.NumberGuess}
        score: few_turns.score
"""

from lightning_mtrl.environments.scored import Talk


def score(talk: Talk) -> float:
    """The environment's own outcome, less a tenth for each turn after the first."""
    return talk.outcome - 0.1 * (len(talk.responses) - 1)
