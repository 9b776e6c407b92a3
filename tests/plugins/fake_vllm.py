"""A stand-in that speaks vLLM's API and samples with transformers and peft; it lies when it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loopback import QuietHandler, listening
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

Reply = dict[str, Any]
NEEDED = {"r", "lora_alpha", "target_modules"}  # vllm/lora/peft_helper.py


@dataclass
class FakeVLLM:
    """Attributes tell what came in, and change what goes out.

    Attributes:
        lie: changes the answer to the n-th completion (from 0), and may wait.
        status: of the answer to the n-th completion.
        allows_updates: False as without VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    """

    model: PreTrainedModel
    max_model_len: int = 1024
    max_lora_rank: int = 16
    allows_updates: bool = True
    lie: Callable[[int, Reply], None] = lambda number, reply: None
    status: Callable[[int], int] = lambda number: 200
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    changes: list[tuple[str, str]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    _peft: PeftModel | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Honest again, with nothing remembered but the adapters."""
        self.lie, self.status, self.allows_updates = lambda number, reply: None, lambda number: 200, True
        self.max_model_len, self.max_lora_rank = 1024, 16
        self.bodies.clear()
        self.changes.clear()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": self._cards()}
        if path == "/v1/completions":
            return self._complete(body)
        if self.allows_updates and path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], Path(body["lora_path"]))
        if self.allows_updates and path == "/v1/unload_lora_adapter":
            return self._unload(body["lora_name"])
        return 404, {"detail": "Not Found"}

    def _cards(self) -> list[dict[str, Any]]:
        base = {"id": "base", "root": "base", "parent": None, "max_model_len": self.max_model_len}
        return [base, *({"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items())]

    def _load(self, name: str, path: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, _error("has already been loaded")
        if not (path / "adapter_model.safetensors").is_file():
            return 404, _error("no such adapter")
        config = json.loads((path / "adapter_config.json").read_text())
        refused = config.get("modules_to_save") or config.get("use_dora") or config["r"] > self.max_lora_rank
        if refused or not config.keys() >= NEEDED:
            return 500, _error("cannot load")
        with self._lock:
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(self.model, path, adapter_name=_inner(name)).eval()
            else:
                self._peft.load_adapter(path, adapter_name=_inner(name))
        self.adapters[name] = str(path)
        self.changes.append(("load", name))
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, name: str) -> tuple[int, Any]:
        if self.adapters.pop(name, None) is None:
            return 404, _error("cannot be found")
        self.changes.append(("unload", name))
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
        if self.status(number) != 200:
            return self.status(number), _error("told to fail")
        if body["model"] not in self.adapters:
            return 404, _error("no such model")
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return 400, _error("too long")
        with self._lock:
            ids, logprobs = self._sample(body)
        choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [f"token_id:{i}" for i in ids]}
        reply: Reply = {"id": "x", "object": "text_completion", "created": 0, "model": body["model"]}
        reply["choices"] = [choice]
        self.lie(number, reply)
        return 200, reply

    @torch.no_grad()
    def _sample(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Token by token in vLLM's way: the told log-probabilities are those of the plain model."""
        assert self._peft is not None
        assert body["return_token_ids"]
        assert body["ignore_eos"]
        assert body["repetition_penalty"] == 1.0
        self._peft.set_adapter(_inner(body["model"]))
        torch.manual_seed(body["seed"])
        prompt = torch.tensor([body["prompt"]])
        found = self._peft.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=True,
            temperature=body["temperature"], top_k=body["top_k"], top_p=body["top_p"], min_p=body["min_p"],
            max_new_tokens=body["max_tokens"], eos_token_id=body["stop_token_ids"], pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids: list[int] = found.sequences[0, prompt.size(1) :].tolist()
        plain = torch.stack(found.logits, 1)[0].log_softmax(-1)
        return ids, plain[torch.arange(len(ids)), ids].tolist()


@contextmanager
def vllm_serving(folder: Path) -> Iterator[FakeVLLM]:
    """A base model on a free port of the loopback."""
    fake = FakeVLLM(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval())

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._send(*fake.answer(self.path, {}))

        def do_POST(self) -> None:
            fake.keys.add(self.headers.get("authorization"))
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*fake.answer(self.path, body))

        def _send(self, status: int, content: Any) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            kind = "text/plain" if isinstance(content, str) else "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    with listening(Handler) as address:
        fake.base_url = f"{address}/v1"
        yield fake


def _inner(name: str) -> str:
    return name.replace(".", "-")  # torch allows no dots in names of modules


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError"}}
