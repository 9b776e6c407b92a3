"""Environments that a configuration can name."""

from lightning_mtrl.environments.document_writing import DocumentWriting
from lightning_mtrl.environments.gymnasium_text import GymnasiumText
from lightning_mtrl.environments.math_tutoring import MathTutoring
from lightning_mtrl.environments.medical_recommendation import MedicalRecommendation
from lightning_mtrl.environments.protocol import Environment, Observation, Optimum, Transition
from lightning_mtrl.environments.scored import MetricScore, Scored
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.environments.tabular_dialogue import TabularDialogue
from lightning_mtrl.environments.textarena import TextArena

__all__ = [
    "DocumentWriting",
    "Environment",
    "GymnasiumText",
    "MathTutoring",
    "MedicalRecommendation",
    "MetricScore",
    "Observation",
    "Optimum",
    "Scored",
    "SuggestedResponse",
    "TabularDialogue",
    "TextArena",
    "Transition",
]
