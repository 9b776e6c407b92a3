"""Credit assigners that a configuration can name: from conversations to a reward for each turn or token."""

from lightning_mtrl.credit.base import Credit, CreditAssigner
from lightning_mtrl.credit.dirichlet import Dirichlet
from lightning_mtrl.credit.itpo import ITPO
from lightning_mtrl.credit.llm_judge import Judge, LLMJudge
from lightning_mtrl.credit.norm_itpo import NormITPO
from lightning_mtrl.credit.outcome import Outcome
from lightning_mtrl.credit.pivotal_judge import PivotalJudge
from lightning_mtrl.credit.prime import PRIME
from lightning_mtrl.credit.prm_config import PRMConfig
from lightning_mtrl.credit.q_difference import QDifference
from lightning_mtrl.credit.trajectory_share import TrajectoryShare
from lightning_mtrl.credit.turn_judge import TurnJudge
from lightning_mtrl.credit.uniform import Uniform

__all__ = [
    "ITPO",
    "PRIME",
    "Credit",
    "CreditAssigner",
    "Dirichlet",
    "Judge",
    "LLMJudge",
    "NormITPO",
    "Outcome",
    "PRMConfig",
    "PivotalJudge",
    "QDifference",
    "TrajectoryShare",
    "TurnJudge",
    "Uniform",
]
