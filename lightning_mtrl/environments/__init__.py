"""Environments that a configuration can name."""

from lightning_mtrl.environments.document_writing import DocumentWriting
from lightning_mtrl.environments.math_tutoring import MathTutoring
from lightning_mtrl.environments.medical_recommendation import MedicalRecommendation
from lightning_mtrl.environments.protocol import Environment, Observation, Optimum, Transition
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.environments.tabular_dialogue import TabularDialogue

__all__ = [
    "DocumentWriting",
    "Environment",
    "MathTutoring",
    "MedicalRecommendation",
    "Observation",
    "Optimum",
    "SuggestedResponse",
    "TabularDialogue",
    "Transition",
]
