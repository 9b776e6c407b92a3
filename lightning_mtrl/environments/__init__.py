"""Environments that a configuration can name."""

from lightning_mtrl.environments.document_writing import DocumentWriting
from lightning_mtrl.environments.gymnasium_text import GymnasiumText
from lightning_mtrl.environments.llm_judges import AccuracyJudge, DiagnosisJudge, DocumentJudge, OutcomeJudge
from lightning_mtrl.environments.llm_user import LLMUser
from lightning_mtrl.environments.math_tutoring import MathTutoring
from lightning_mtrl.environments.medical_recommendation import MedicalRecommendation
from lightning_mtrl.environments.protocol import Environment, Observation, Optimum, Transition
from lightning_mtrl.environments.scenarios import FileScenarios, Scenarios, TaskScenarios
from lightning_mtrl.environments.scored import MetricScore, Scored
from lightning_mtrl.environments.suggested_response import SuggestedResponse
from lightning_mtrl.environments.tabular_dialogue import TabularDialogue
from lightning_mtrl.environments.textarena import TextArena
from lightning_mtrl.environments.verifiers import Verifiers

__all__ = [
    "AccuracyJudge",
    "DiagnosisJudge",
    "DocumentJudge",
    "DocumentWriting",
    "Environment",
    "FileScenarios",
    "GymnasiumText",
    "LLMUser",
    "MathTutoring",
    "MedicalRecommendation",
    "MetricScore",
    "Observation",
    "Optimum",
    "OutcomeJudge",
    "Scenarios",
    "Scored",
    "SuggestedResponse",
    "TabularDialogue",
    "TaskScenarios",
    "TextArena",
    "Transition",
    "Verifiers",
]
