from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_llm import Answer, serving

from lightning_mtrl.errors import UserError
from lightning_mtrl.llm.client import ChatClient
from lightning_mtrl.llm.failures import LLMFailure
from lightning_mtrl.llm.server import Server

pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "hello"}]
SCORE = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 10}},
    "required": ["score"],
}


def client(base_url: str, **changes: Any) -> ChatClient:
    quick: dict[str, Any] = {"retries": 2, "backoff_seconds": 0.01, "timeout_seconds": 5.0}
    return ChatClient(Server("fake", base_url, **(quick | changes)))


def ask(one: ChatClient) -> str:
    return asyncio.run(one.chat(ASKED))


def test_a_reply_is_counted_in_tokens_and_money() -> None:
    with serving([Answer("hi there")]) as fake:
        one = client(fake.base_url, input_price=2.0, output_price=50.0)
        assert ask(one) == "hi there"
    # 100 tokens at 2 and 10 tokens at 50 a million.
    assert one.usage.cost == pytest.approx(100 * 2e-6 + 10 * 50e-6)
    assert (one.usage.requests, one.usage.prompt_tokens, one.usage.sampled_tokens) == (1, 100, 10)
    sent = fake.bodies[0]
    assert (sent["model"], sent["messages"], sent["temperature"]) == ("fake", ASKED, 0.7)


@pytest.mark.parametrize(
    "bad",
    [
        Answer(status=500, body="oh"),
        Answer(status=503, body="{}"),
        Answer(status=429, headers=(("retry-after", "0"),), body="{}"),
        Answer(body="this is no JSON"),
        Answer(body="[1, 2]"),
        Answer(body='{"choices": "none"}'),
        Answer(body='{"choices": [{"message": null}]}'),
        Answer(text=None),
        Answer(text=""),
        Answer(seconds=0.6),
    ],
)
def test_what_may_pass_is_tried_again_and_then_given_up(bad: Answer) -> None:
    with serving([bad, Answer("well")]) as fake:
        one = client(fake.base_url, timeout_seconds=0.3)
        assert ask(one) == "well"
        assert (one.usage.requests, one.usage.retries, one.usage.failures) == (2, 1, 0)
    with serving([bad]) as fake:
        one = client(fake.base_url, timeout_seconds=0.3)
        with pytest.raises(LLMFailure, match="3 attempts"):
            ask(one)
        assert (one.usage.requests, one.usage.failures) == (3, 1)


def test_a_server_that_is_down_is_a_failure() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(LLMFailure, match="no connection, 3 attempts"):
            ask(client(address))


def test_retry_after_is_obeyed_up_to_a_bound() -> None:
    busy = Answer(status=429, headers=(("retry-after", "0.4"),), body="{}")
    with serving([busy, Answer()]) as fake:
        ask(client(fake.base_url))
    assert fake.times[1] - fake.times[0] >= 0.4
    with serving([Answer(status=429, headers=(("retry-after", "3600"),), body="{}")]) as fake:
        with pytest.raises(LLMFailure, match="asks to wait too long"):
            ask(client(fake.base_url))
        assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    "asked", ["0", "-5", "nan", "-inf", "0.001", "Thu, 01 Jan 1970 00:00:00 GMT", "soon"]
)
def test_a_server_that_asks_for_no_wait_gets_the_usual_one(asked: str) -> None:
    with serving([Answer(status=429, headers=(("retry-after", asked),), body="{}")]) as fake:
        with pytest.raises(LLMFailure, match="HTTP 429, 3 attempts"):
            ask(client(fake.base_url, backoff_seconds=0.1))
        first, second, third = fake.times
    assert second - first >= 0.1
    assert third - second >= 0.2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_request_is_not_repeated(status: int) -> None:
    with serving([Answer(status=status, body='{"error": {"message": "too long"}}')]) as fake:
        with pytest.raises(LLMFailure, match=f"request refused .HTTP {status}."):
            ask(client(fake.base_url))
        assert len(fake.bodies) == 1


@pytest.mark.parametrize(("status", "why"), [(401, "key is missing"), (403, "key may not"), (404, "no such")])
def test_a_wrong_key_or_model_is_the_users_mistake(status: int, why: str) -> None:
    with serving([Answer(status=status, body="{}")]) as fake, pytest.raises(UserError, match=why):
        ask(client(fake.base_url))


def test_not_more_requests_than_allowed_run_at_once() -> None:
    async def many(one: ChatClient) -> None:
        # Copies as of the conversations of a collection: the limit is one for all of them.
        await asyncio.gather(*(copy.deepcopy(one).chat(ASKED, seed) for seed in range(12)))

    for limit in (1, 3):
        with serving(lambda body: Answer(seconds=0.03)) as fake:
            one = client(fake.base_url, concurrency=limit)
            asyncio.run(many(one))
            assert fake.most_at_once == limit
            assert one.usage.requests == 12


TWO = "two \ud83d"  # half of a character, which JSON can say and UTF-8 cannot


def test_equal_requests_are_answered_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "new" / "record.jsonl"
    with serving([Answer("one"), Answer(TWO), Answer("three")]) as fake:
        first = client(fake.base_url, record=str(record))
        assert [asyncio.run(first.chat(ASKED, seed)) for seed in (0, 0, 1)] == ["one", "one", TWO]
        with record.open("a") as file:
            file.write('{"key": "cut o')
        again = client(fake.base_url, record=str(record))
        assert asyncio.run(again.chat(ASKED, 1)) == TWO
        assert (again.usage.requests, again.usage.recorded) == (0, 1)
        hotter = client(fake.base_url, record=str(record), temperature=1.0)
        assert asyncio.run(hotter.chat(ASKED, 1)) == "three"
    kept = json.loads(record.read_text().splitlines()[0])
    assert kept["request"]["messages"] == ASKED
    assert kept["reply"] == {"content": "one", "prompt_tokens": 100, "completion_tokens": 10}


def _numbered(fake_status: int = 200) -> Any:
    numbers = itertools.count(1)

    def answer(body: Any) -> Answer:
        number = next(numbers)
        return Answer(f"reply {number}", seconds=0.05, status=fake_status if number == 1 else 200)

    return answer


def _at_once(one: ChatClient, seeds: Sequence[int]) -> list[Any]:
    async def many() -> list[Any]:
        return await asyncio.gather(*(one.chat(ASKED, seed) for seed in seeds), return_exceptions=True)

    return asyncio.run(many())


def test_equal_requests_under_way_at_once_are_one_and_get_one_reply(tmp_path: Path) -> None:
    record = str(tmp_path / "record.jsonl")
    with serving(_numbered()) as fake:
        one = client(fake.base_url, record=record)
        first, *rest, other = _at_once(one, [1, 1, 1, 1, 2])
        assert rest == [first] * 3
        assert {first, other} == {"reply 1", "reply 2"}
        assert (len(fake.bodies), one.usage.requests, one.usage.recorded) == (2, 2, 3)
        # Another event loop, and another client, as of a repeated run.
        assert (
            _at_once(one, [1, 2]) == _at_once(client(fake.base_url, record=record), [1, 2]) == [first, other]
        )
        assert len(fake.bodies) == 2


def test_a_request_that_fails_lets_the_next_equal_one_be_made(tmp_path: Path) -> None:
    with serving(_numbered(fake_status=400)) as fake:
        one = client(fake.base_url, record=str(tmp_path / "record.jsonl"))
        failed, *rest = _at_once(one, [1, 1, 1])
        assert isinstance(failed, LLMFailure)
        assert rest == ["reply 2"] * 2
        assert len(fake.bodies) == 2


def test_a_reply_that_was_cut_off_is_a_failure_and_paid_once(tmp_path: Path) -> None:
    record = str(tmp_path / "record.jsonl")
    told = r"a reply was cut off at max_tokens \(7\)"
    with serving([Answer("I would like a red ca", finish_reason="length")]) as fake:
        one = client(fake.base_url, max_tokens=7, record=record)
        with pytest.raises(LLMFailure, match=told):
            ask(one)
        assert (len(fake.bodies), one.usage.failures, one.usage.sampled_tokens) == (1, 1, 10)
        with pytest.raises(LLMFailure, match=told):
            ask(client(fake.base_url, max_tokens=7, record=record))
        assert ask(client(fake.base_url, max_tokens=7, record=record, keep_cut_replies=True)) == (
            "I would like a red ca"
        )
        assert len(fake.bodies) == 1


def test_an_object_that_is_there_in_full_counts_also_where_more_was_cut_off() -> None:
    with serving([Answer('{"score": 7} because the', finish_reason="length")]) as fake:
        assert asyncio.run(client(fake.base_url).chat_json(ASKED, SCORE)) == {"score": 7}
    half = Answer('{"score": 7', finish_reason="length")
    with serving([half]) as fake, pytest.raises(LLMFailure, match="no JSON object"):
        asyncio.run(client(fake.base_url).chat_json(ASKED, SCORE))


def test_equal_requests_without_a_record_stay_independent() -> None:
    with serving(_numbered()) as fake:
        assert len(set(_at_once(client(fake.base_url), [1, 1, 1]))) == len(fake.bodies) == 3


def test_of_two_recorded_replies_to_equal_requests_the_first_holds(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    with serving(_numbered()) as fake:
        ours, theirs = (client(fake.base_url, record=str(record)) for _ in range(2))
        assert [ask(ours), ask(theirs)] == ["reply 1", "reply 2"]  # as two processes do
        assert len(record.read_text().splitlines()) == 2
        assert ask(client(fake.base_url, record=str(record))) == ask(ours) == "reply 1"


def test_json_is_found_in_what_stands_around_it_and_mended_once() -> None:
    with serving([Answer('Sure: ```json\n{"score": 7}\n``` {"x"}')]) as fake:
        assert asyncio.run(client(fake.base_url).chat_json(ASKED, SCORE)) == {"score": 7}
    with serving([Answer('{"score": 11}'), Answer('{"score": 10}')]) as fake:
        assert asyncio.run(client(fake.base_url).chat_json(ASKED, SCORE)) == {"score": 10}
        assert [m["role"] for m in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert "score: 11 is greater than the maximum of 10" in fake.bodies[1]["messages"][-1]["content"]
    for wrong in ("no", '{"score": "7"}', '{"points": 7}', '{"score": NaN', "[7]"):
        with serving([Answer(wrong)]) as fake:
            one = client(fake.base_url)
            with pytest.raises(LLMFailure, match=r"does not fit the schema|no JSON object"):
                asyncio.run(one.chat_json(ASKED, SCORE))
            assert (len(fake.bodies), one.usage.failures) == (2, 1)


def test_the_key_comes_from_the_environment_and_appears_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-very-secret-0123456789"
    monkeypatch.setenv("MY_KEY", secret)
    caplog.set_level(logging.DEBUG)
    record = tmp_path / "record.jsonl"
    # Some servers repeat the key in what they say.
    echo = json.dumps({"error": {"message": f"Incorrect API key provided: {secret}"}})
    seen = []
    for status in (200, 400, 401, 429, 500):
        answer = Answer() if status == 200 else Answer(status=status, body=echo)
        with serving([answer]) as fake:
            one = client(fake.base_url, record=str(record), api_key_variable="MY_KEY", retries=0)
            try:
                ask(one)
            except (LLMFailure, UserError) as error:
                seen += [str(error), repr(error), repr(error.__cause__)]
            assert fake.keys == [f"Bearer {secret}"]
            seen += [repr(one), repr(one.usage), repr(one.server), json.dumps(asdict(one.server))]
    assert len(seen) == 5 * 4 + 4 * 3
    assert secret not in "\n".join(seen) + record.read_text() + caplog.text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"base_url": "localhost:8000/v1"},
            r"^base_url is 'localhost:8000/v1', but .* http:// or .*, such as 'http://localhost:8000/v1'$",
        ),
        ({"base_url": "my-host/v1"}, r"is 'my-host/v1', but .* such as 'http://my-host/v1'"),
        ({"base_url": "10.0.0.7:8000"}, r"is '10.0.0.7:8000', but .* such as 'http://10.0.0.7:8000'"),
        ({"base_url": "ftp://host/v1"}, r"is 'ftp://host/v1', but .* such as 'http://localhost:8000/v1'"),
        ({"base_url": "http://host:80x/v1"}, r"is 'http://host:80x/v1', but an address"),
        ({"base_url": "http:///v1"}, r"is 'http:///v1', but an address"),
        ({"base_url": "sk-123@host/v1"}, r"is '\.\.\.@host/v1', but an address"),
        ({"base_url": "host/v1?key=sk-123"}, r"is 'host/v1\.\.\.', but an address"),
        ({"base_url": "http://me:sk-123@host/v1"}, "no user, password or query"),
        ({"base_url": "http://host/v1?key=sk-123"}, "no user, password or query"),
        ({"api_key_variable": "sk-123"}, "never the key itself"),
        ({"record": "out.txt"}, "record must end with .jsonl"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be a number > 0"),
        ({"backoff_seconds": float("nan")}, "backoff_seconds must be a number of at least 0"),
    ],
)
def test_a_wrong_server_is_refused_without_showing_a_key(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        Server("fake", **changes)
    assert "sk-123" not in str(error.value)
