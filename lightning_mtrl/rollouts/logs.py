"""Logged conversations in files: JSON lines, Parquet, or a data set of the Hugging Face Hub.

A record is what `Conversation.to_json` gives. OpenAI's `messages` and ShareGPT's `conversations` are read as
they are; what they lack has the defaults of `Conversation.from_json`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_mtrl.conversation import Conversation
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.tokens import opening_as_prompt
from lightning_mtrl.runs.atomic import replacing_file
