"""Rollouts of a server that speaks vLLM's API, against those that are sampled here."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVLLM, Reply, vllm_serving

from lightning_mtrl.algorithms.rescoring import with_own_logprobs
from lightning_mtrl.assembly import Parts, assemble
from lightning_mtrl.config import DataConfig, FabricConfig, LoopConfig, ModelConfig, RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.models.tiny import TINY_FOLDER
from lightning_mtrl.rollouts.collector import Collector
from lightning_mtrl.rollouts.policy_server import PolicyServer
from lightning_mtrl.rollouts.results import Rollouts, Share
from lightning_mtrl.serving_config import ServingConfig

pytest.importorskip("openai")
NUMBER = 6


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVLLM]:
    with vllm_serving(TINY_FOLDER) as fake:
        yield fake


@pytest.fixture(scope="module")
def parts(server: FakeVLLM, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    data = DataConfig(
        conversations=NUMBER,
        max_turns=3,
        rows=4,
        max_response_tokens=12,
        top_k=1,  # nothing is left to chance, so the server must say what is said here
        max_failure_share=1.0,
        server=ServingConfig(server.base_url, concurrency=3, retries=0),
    )
    config = RunConfig(
        fabric=FabricConfig("cpu"),
        model=ModelConfig(lora_rank=4, context_length=256),
        data=data,
        loop=LoopConfig(1),
        loggers=[],
    )
    return assemble(config, show_progress=False, served=tmp_path_factory.mktemp("served"))


@pytest.fixture(autouse=True)
def honest(server: FakeVLLM) -> None:
    server.reset()


def collected(parts: Parts, number: int = NUMBER) -> Rollouts:
    with parts.backbone.sampling("policy") as model:
        return parts.collector.collect(model, conversations=number, seed=5, policy="iteration-0000")


def collected_here(parts: Parts) -> Rollouts:
    collector = Collector(
        parts.environment, parts.context.chat, sampling=parts.context.sampling, context_length=256,
        max_turns=3, rows=4, show_progress=False,
    )  # fmt: skip
    with parts.backbone.sampling("policy") as model:
        return collector.collect(model, conversations=NUMBER, seed=5, policy="iteration-0000")


def logprobs_of(rollouts: Rollouts) -> list[float]:
    return [logprob for c in rollouts.conversations for t in c.turns for logprob in t.behaviour_logprobs]


def without_logprobs(rollouts: Rollouts) -> list[Any]:
    return [
        replace(c, turns=tuple(replace(t, behaviour_logprobs=()) for t in c.turns))
        for c in rollouts.conversations
    ]


def policy_server(parts: Parts) -> PolicyServer:
    found = parts.collector._server
    assert found is not None
    return found


def test_a_greedy_policy_says_on_the_server_what_it_says_here(server: FakeVLLM, parts: Parts) -> None:
    """Ids, masks, texts, rewards and outcomes are the same; log-probabilities up to rounding."""
    served, here = collected(parts), collected_here(parts)
    assert len(served.conversations) == NUMBER
    assert sum(len(c.turns) for c in served.conversations) > NUMBER
    assert without_logprobs(served) == without_logprobs(here)
    assert logprobs_of(served) == pytest.approx(logprobs_of(here), abs=1e-4)
    # The whole conversation goes there with every response.
    first = served.conversations[0]
    wanted = [*first.prompt_ids, *first.turns[0].response_ids, *first.turns[0].observation_ids]
    assert any(body["prompt"] == wanted for body in server.bodies)
    assert {body["max_tokens"] for body in server.bodies} == {12}
    assert server.bodies[0]["stop_token_ids"] == sorted(parts.context.chat.end_ids)


def test_seeds_differ_by_conversation_and_turn_and_repeat_with_the_collection(
    server: FakeVLLM, parts: Parts
) -> None:
    collected(parts)
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == len(seeds)
    collected(parts)
    assert sorted(body["seed"] for body in server.bodies[len(seeds) :]) == sorted(seeds)


def test_an_honest_server_agrees_with_the_trainer(parts: Parts) -> None:
    served = collected(parts)
    rescored, measured = with_own_logprobs(served, parts.context)
    assert 0 <= measured["server_difference_mean"] <= measured["server_difference_max"] < 1e-4
    assert measured["server_kl"] < 1e-6
    assert logprobs_of(rescored) == pytest.approx(logprobs_of(served), abs=1e-4)


def test_wrong_logprobs_are_measured_and_replaced(server: FakeVLLM, parts: Parts) -> None:
    truth = logprobs_of(collected(parts))

    def lie(number: int, reply: Reply) -> None:
        told = reply["choices"][0]["logprobs"]["token_logprobs"]
        reply["choices"][0]["logprobs"]["token_logprobs"] = [logprob - 1.0 for logprob in told]

    server.lie = lie
    rescored, measured = with_own_logprobs(collected(parts), parts.context)
    assert measured["server_difference_mean"] == pytest.approx(1.0, abs=1e-4)
    assert measured["server_difference_max"] == pytest.approx(1.0, abs=1e-4)
    assert measured["server_kl"] == pytest.approx(math.e - 2, abs=1e-3)  # exp(1) - 1 - 1
    assert logprobs_of(rescored) == pytest.approx(truth, abs=1e-4)


def _set(key: str, value: Callable[[Any], Any]) -> Callable[[Reply], None]:
    def change(reply: Reply) -> None:
        reply["choices"][0][key] = value(reply["choices"][0][key])

    return change


LIES: dict[str, tuple[Callable[[Reply], None], str]] = {
    "unknown id": (_set("token_ids", lambda ids: [10**6, *ids[1:]]), "token ids outside the vocabulary"),
    "negative id": (_set("token_ids", lambda ids: [-1, *ids[1:]]), "token ids outside the vocabulary"),
    "nothing": (_set("token_ids", lambda ids: []), "no token ids in the reply, 1 attempt"),
    "no ids": (_set("token_ids", lambda ids: None), "no token ids in the reply, 1 attempt"),
    "no choices": (lambda reply: reply.update(choices=[]), "no token ids in the reply, 1 attempt"),
    "too few log-probabilities": (
        _set("logprobs", lambda logprobs: {"token_logprobs": logprobs["token_logprobs"][:-1]}),
        "not one log-probability for each token id, 1 attempt",
    ),
    "infinite": (
        _set("logprobs", lambda told: {"token_logprobs": [math.inf for _ in told["token_logprobs"]]}),
        "log-probabilities that are no finite numbers, 1 attempt",
    ),
    "another model": (lambda reply: reply.update(model="iteration-0007"), "another model answered"),
}


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_costs_its_conversation_and_no_other(
    name: str, server: FakeVLLM, parts: Parts
) -> None:
    change, cause = LIES[name]
    server.lie = lambda number, reply: change(reply) if number == 1 else None
    rollouts = collected(parts)
    assert len(rollouts.conversations) == NUMBER - 1
    ((told, number),) = rollouts.dropped.items()
    assert told.startswith(f"LLMFailure: {cause}")
    assert number == 1


def test_a_response_that_ends_twice_or_not_at_all_is_no_response(server: FakeVLLM, parts: Parts) -> None:
    end = min(parts.context.chat.end_ids)

    def lie(number: int, reply: Reply) -> None:
        if number < 2:
            ids = [end, end] if number == 0 else [5, 6]
            reply["choices"][0] |= {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0, -1.0]}}

    server.lie = lie
    rollouts = collected(parts)
    assert rollouts.dropped == {
        "LLMFailure: a response that goes on after its end": 1,
        "LLMFailure: a response that stops before its end": 1,
    }


def test_an_error_of_the_server_is_counted(server: FakeVLLM, parts: Parts) -> None:
    server.status = lambda number: 500 if number < 2 else 200
    rollouts = collected(parts)
    assert rollouts.dropped == {"LLMFailure: HTTP 500, 1 attempt": 2}
    assert len(rollouts.conversations) == NUMBER - 2


def test_a_server_that_gives_no_token_ids_is_told_as_such_and_not_as_the_environment(
    server: FakeVLLM, parts: Parts
) -> None:
    server.lie = lambda number, reply: reply["choices"][0].pop("token_ids")
    with pytest.raises(UserError, match=r"no token ids in the reply, 1 attempt \(6 times\)") as told:
        collected(parts)
    assert str(told.value).startswith(
        f"data.server.base_url is '{server.base_url}': every conversation failed"
    )
    assert "it must be a vLLM server, which returns the ids of the tokens" in str(told.value)
    assert "nvironment" not in str(told.value)


def test_where_most_failures_are_the_servers_it_is_named_and_else_the_environment() -> None:
    def told(unanswered: int, server: str | None) -> str:
        share = Share([], Counter({"LLMFailure: HTTP 500": 6}), None, unanswered=unanswered)
        with pytest.raises(UserError) as raised:
            Rollouts.of([share, replace(share)], 1.0, server=server)
        return str(raised.value)

    assert told(4, "http://a/v1").startswith("data.server.base_url is 'http://a/v1'")
    assert told(3, "http://a/v1").startswith("environment: ")
    assert told(0, None).startswith("environment: ")


def test_a_slow_answer_is_counted(server: FakeVLLM, parts: Parts) -> None:
    connection = policy_server(parts).client.connection
    usual = connection.server
    server.lie = lambda number, reply: time.sleep(9) if number == 0 else None
    connection.server = replace(usual, timeout_seconds=6.0)
    try:
        rollouts = collected(parts, 2)
    finally:
        connection.server = usual
    assert rollouts.dropped == {"LLMFailure: no reply in time, 1 attempt": 1}
    assert len(rollouts.conversations) == 1


def test_a_new_policy_gets_a_new_name_and_the_old_one_goes(server: FakeVLLM, parts: Parts) -> None:
    served = policy_server(parts)
    first = served.serve("iteration-0000", 256)
    server.reset()
    assert served.serve("iteration-0000", 256) == first
    assert server.changes == []  # it is there already
    weight = parts.backbone.parameters_of("policy")[1]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight += 0.05
    try:
        # The same iteration after a run was killed, with other weights: it is another adapter.
        second = served.serve("iteration-0000", 256)
        assert second != first
        assert second.startswith("iteration-0000-")
        assert server.changes == [("load", second), ("unload", first)]
        assert list(server.adapters) == [second]
        assert [path.name for path in Path(server.adapters[second]).parent.iterdir()] == [second]
        assert with_own_logprobs(collected(parts), parts.context)[1]["server_difference_max"] < 1e-4
        assert {body["model"] for body in server.bodies} == {second}
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_a_server_that_cannot_serve_the_policy_is_told_at_once(server: FakeVLLM, parts: Parts) -> None:
    served = policy_server(parts)
    server.max_model_len = 100
    with pytest.raises(UserError, match=r"model.context_length is 256, but .* 100 tokens"):
        served.serve("iteration-0000", 256)
    server.reset()
    server.max_lora_rank = 1
    with pytest.raises(UserError, match=r"cannot load an adapter: HTTP 500.*--max-lora-rank"):
        served.serve("iteration-0001", 256)
    server.reset()
    server.allows_updates = False
    with pytest.raises(UserError, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        served.serve("iteration-0002", 256)


def test_what_a_server_needs_is_in_the_adapter(server: FakeVLLM, parts: Parts) -> None:
    name = policy_server(parts).serve("iteration-0000", 256)
    config = json.loads((Path(server.adapters[name]) / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] >= 1
    assert config["modules_to_save"] is None
    assert config["bias"] == "none"
    assert not config["use_dora"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"base_url": "localhost:8000/v1"},
            r"^data.server.base_url is 'localhost:8000/v1', but .* such as 'http://localhost:8000/v1'\.$",
        ),
        ({"base_url": "http://me:secret@host/v1"}, "data.server.base_url is .* must hold no user"),
        ({"api_key_variable": "sk-secret"}, "data.server.api_key_variable must be the name"),
        ({"concurrency": 0}, "data.server.concurrency is 0"),
        ({"timeout_seconds": 0.0}, "data.server.timeout_seconds is 0.0"),
        ({"retries": -1}, "data.server.retries is -1"),
        ({"adapter_folder": " "}, "data.server.adapter_folder is ' '"),
    ],
)
def test_a_wrong_value_is_named_and_no_secret_is_shown(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        ServingConfig(**values)
    assert "secret" not in str(raised.value)


def test_full_fine_tuning_is_refused_with_a_server() -> None:
    data = DataConfig(server=ServingConfig("http://localhost:8000/v1"))
    with pytest.raises(UserError, match=r"model.fine_tuning is 'full'.*--model.fine_tuning lora"):
        RunConfig(model=ModelConfig(fine_tuning="full"), data=data)
