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
    """The environment's own outcome, a tenth of it less for each turn after the first.

    It is a factor and no subtraction, so that an outcome in [0, 1] stays there, which is what the default
    loss of the Q-critic and the success rates are for: a failure is 0 however long it took.
    """
    return talk.outcome * 0.9 ** (len(talk.responses) - 1)
