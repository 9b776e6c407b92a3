"""Environments that a configuration can name."""

from lightning_mtrl.environments.protocol import Environment, Observation, Optimum, Transition
from lightning_mtrl.environments.suggested_response import SuggestedResponse

__all__ = ["Environment", "Observation", "Optimum", "SuggestedResponse", "Transition"]
