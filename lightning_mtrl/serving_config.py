"""Where rollouts are sampled when a server does it (vLLM)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mtrl.addresses import check_address, check_key_variable
from lightning_mtrl.errors import UserError
from lightning_mtrl.ranges import COUNT, expect, expect_above_zero, expect_at_least, expect_in


@dataclass(frozen=True)
class ServingConfig:
    """A vLLM server that samples the conversations of `fit`; other commands sample here.

    It serves the base model `model.name` with `--enable-lora`, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in
    its environment. Each iteration's policy is written as an adapter and loaded there under a new name.

    Attributes:
        base_url: address up to and with its version, such as "http://localhost:8000/v1"; null: no server.
        api_key_variable: environment variable that holds the server's key; the key itself stands nowhere.
        concurrency: requests under way at once in one process; `data.rows` conversations are held at once.
        timeout_seconds: for one attempt, until the whole response is there.
        retries: attempts after the first one; then the conversation is dropped and counted.
        adapter_folder: folder in which each run makes one for its adapters; the server must see it under the
            same path; null: "served" in the run's folder.
    """

    base_url: str | None = None
    api_key_variable: str = "VLLM_API_KEY"
    concurrency: int = 128
    timeout_seconds: float = 300.0
    retries: int = 2
    adapter_folder: str | None = None

    def __post_init__(self) -> None:
        try:
            if self.base_url is not None:
                check_address(self.base_url)
            check_key_variable(self.api_key_variable)
        except ValueError as error:
            raise UserError(f"data.server.{error}.") from None
        expect_in(COUNT, "data.server.concurrency", self.concurrency)
        expect_above_zero("data.server.timeout_seconds", self.timeout_seconds, 300.0)
        expect_at_least("data.server.retries", self.retries, 0, 2)
        named = self.adapter_folder is None or bool(self.adapter_folder.strip())
        expect(
            named, "data.server.adapter_folder", self.adapter_folder, "a folder, or null", "/shared/adapters"
        )

    def expect_adapters(self, fine_tuning: str) -> None:
        """Refuse a policy that is no adapter, and so cannot be given to a server that runs."""
        if self.base_url is not None and fine_tuning != "lora":
            raise UserError(
                f"model.fine_tuning is {fine_tuning!r}, but data.server.base_url is set, and a server that "
                f"runs takes new adapters and no new models. Pass --model.fine_tuning lora, or "
                f"--data.server.base_url null to sample here."
            )
