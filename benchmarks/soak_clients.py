"""Clients of a soak: each kind asks for something else, over HTTP, and knows what it must get.

Knows nothing of processes or memory.
"""

import asyncio
import dataclasses
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2

TIMEOUT_S = 300.0
KV_CHOICES: list[dict[str, Any] | None] = [
    None,
    {"mode": "off"},
    {"mode": "fixed", "budget": 48, "interval": 32},
    {"mode": "fixed", "budget": 64, "interval": 32, "policy": "streaming"},
    {"mode": "adaptive", "budget": 48, "interval": 32},
]
OPENINGS = ("24:6 14 3 8|", "The numbers are 4, 9 and 12. ", "3 12 5 7=", "Add: 17 + 25 = ")
WORDS = [f"{first}{last}" for first in ("red", "blue", "tall", "old") for last in range(10)]


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of all that was sent."""

    sent: Counter[str] = dataclasses.field(default_factory=Counter)  # by kind
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    left: Counter[str] = dataclasses.field(default_factory=Counter)  # by the client's own will
    busy: int = 0  # told to come again: the queue was full
    faults: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_lost(self) -> int:
        """Sent, and neither ended, nor left, nor told to come again, nor at fault."""
        over = self.ended.total() + self.left.total() + self.busy + len(self.faults)
        return self.sent.total() - over


@dataclasses.dataclass(slots=True)
class Told:
    """What one sample of /generate said, event by event."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


class Clients:
    """Makes requests at random; `seed` determines what is asked for, not when."""

    def __init__(self, http: httpx2.AsyncClient, seed: int, *, may_adapt: bool = True) -> None:
        """may_adapt: whether some ask for kv mode "adaptive"."""
        self.tally = Tally()
        self.forgotten_at: list[float] = []  # when states were held and left to their leases
        self._kv = [kv for kv in KV_CHOICES if may_adapt or not kv or kv["mode"] != "adaptive"]
        self._http, self._random, self._num_names = http, random.Random(seed), 0

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name: sends one request, or a few that belong together, to its end."""
        return {
            "short": self.short,
            "long": self.long,
            "samples": self.samples,
            "chat": self.chat,
            "stop strings": self.stop_strings,
            "grammar": self.grammar,
            "vanish": self.vanish,
            "abort": self.abort,
            "hold and fork": self.hold_and_fork,
        }

    async def short(self) -> None:
        told = await self._generate("short", self._sampling(self._random.randint(1, 32)))
        self._check_lengths("short", told)

    async def long(self) -> None:
        told = await self._generate("long", self._sampling(self._random.randint(150, 500)))
        self._check_lengths("long", told)

    async def samples(self) -> None:
        """n=8."""
        sampling = self._sampling(self._random.randint(4, 48), n=8)
        self._check_lengths("samples", await self._generate("samples", sampling))

    async def chat(self) -> None:
        """The route that most clients use, whole answers."""
        messages = [{"role": "user", "content": self._text()}]
        body = {"model": "soak", "messages": messages, "max_tokens": 40, "temperature": 0.7}
        self.tally.sent["chat"] += 1
        response = await self._http.post("/v1/chat/completions", json=body)
        if self._is_answer("chat", response):
            reason = response.json()["choices"][0]["finish_reason"]
            self._note("chat", reason in ("stop", "length"), f"ended with {reason}")

    async def stop_strings(self) -> None:
        """Answers must end before what they were to stop at."""
        stop = self._random.choice([["1"], ["=", "|"], [" "], ["7", "+1", "up"], ["\n\n"]])
        sampling = {**self._sampling(200), "stop": stop, "ignore_eos": False}
        for sample in await self._generate("stop strings", sampling):
            leaked = [text for text in stop if text in sample.text]
            self._note("stop strings", not leaked, f"{leaked} in {sample.text!r}")

    async def grammar(self) -> None:
        """Some of the same few grammars again, so that compiled ones are shared."""
        words = self._random.sample(WORDS[:4], 2)
        pattern = f"({words[0]}|{words[1]})( ({words[0]}|{words[1]})){{0,3}}\\."
        sampling = {**self._sampling(60), "regex": pattern, "ignore_eos": False}
        for sample in await self._generate("grammar", sampling):
            fits = re.fullmatch(pattern, sample.text) is not None
            fits = fits or sample.finish_reason == "length"
            self._note("grammar", fits, f"{sample.text!r} is not {pattern}")

    async def vanish(self) -> None:
        """Leaves in the middle of a stream, without a word."""
        body = self._body(self._sampling(700, n=self._random.choice([1, 1, 3])))
        self.tally.sent["vanish"] += 1
        num_events = self._random.randrange(1, 30)
        async with self._http.stream("POST", "/generate", json=body) as response:
            if not await self._is_stream("vanish", response):
                return
            async for _ in _events(response):
                num_events -= 1
                if num_events == 0:
                    break
        self.tally.left["vanish"] += 1

    async def abort(self) -> None:
        """Asks for an end by name, from another connection, and reads to it."""
        name = self._name("abort")

        async def end_it() -> None:
            await asyncio.sleep(self._random.random())
            await self._http.post("/abort_request", json={"rid": name})

        ending = asyncio.create_task(end_it())
        told = await self._generate("abort", self._sampling(400), rid=name)
        await ending
        for sample in told:
            reason = sample.finish_reason
            self._note("abort", reason in ("abort", "length"), f"ended with {reason}")

    async def hold_and_fork(self) -> None:
        """A held state, branches of it, and a release, which every third client forgets."""
        name, text = self._name("hold"), self._text()
        sampling = {**self._sampling(24), "return_tokens": True}
        parent = await self._generate("hold", sampling, text=text, rid=name, hold=True)
        self._check_lengths("hold", parent)
        if len(parent) == 1:
            more = text + parent[0].text
            branches = [
                self._generate("fork", self._sampling(16), text=f"{more} {n}", parent_id=name)
                for n in range(self._random.randint(1, 3))
            ]
            for told in await asyncio.gather(*branches):
                self._check_lengths("fork", told)
        if self._random.random() < 2 / 3:
            await self._http.post("/release", json={"request_ids": [name]})
        else:
            self.forgotten_at.append(time.monotonic())

    async def greedy(self, text: str, max_tokens: int) -> list[int]:
        """The probe: what the model finds likeliest, token by token, from a full cache."""
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        told = await self._generate("probe", sampling, text=text, kv={"mode": "off"})
        self._check_lengths("probe", told)
        return told[0].token_ids if told else []

    # one request

    async def _generate(self, kind: str, sampling: dict[str, Any], **fields: Any) -> list[Told]:
        """Stream /generate to its end; nothing where the answer is no stream of samples."""
        sampling.pop("return_tokens", None)
        self.tally.sent[kind] += sampling.get("n", 1)
        told: dict[int, Told] = {}
        body = self._body(sampling) | fields
        async with self._http.stream("POST", "/generate", json=body) as response:
            if not await self._is_stream(kind, response, sampling.get("n", 1)):
                return []
            async for event in _events(response):
                if "error" in event:
                    self._fault(kind, event["error"]["message"])
                    return []
                sample = told.setdefault(event.get("sample_index", 0), Told())
                sample.token_ids += event.get("token_ids", ())
                sample.text += event.get("text_delta", "")
                sample.finish_reason = event.get("finish_reason") or sample.finish_reason
        for index in range(len(told), sampling.get("n", 1)):
            self._fault(kind, f"sample {index} said nothing")
        return list(told.values())

    def _body(self, sampling: dict[str, Any]) -> dict[str, Any]:
        kv = self._random.choice(self._kv)
        body = {"text": self._text(), "sampling_params": sampling, "stream": True}
        return body | {"stream_format": "delta"} | ({"kv": kv} if kv else {})

    def _sampling(self, max_tokens: int, n: int = 1) -> dict[str, Any]:
        rng = self._random
        return {
            "max_tokens": max_tokens,
            "n": n,
            "seed": rng.randrange(2**31),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
            "ignore_eos": True,
        }

    def _text(self) -> str:
        rng = self._random
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 3, 12, 40])))
        return rng.choice(OPENINGS) + words

    def _name(self, kind: str) -> str:
        self._num_names += 1
        return f"soak-{kind}-{self._num_names}"

    # what came of it

    def _check_lengths(self, kind: str, told: list[Told]) -> None:
        for sample in told:
            is_right = sample.finish_reason == "length" and bool(sample.token_ids)
            self._note(kind, is_right, f"{len(sample.token_ids)}, {sample.finish_reason}")

    def _note(self, kind: str, is_right: bool, fault: str) -> None:
        if is_right:
            self.tally.ended[kind] += 1
        else:
            self._fault(kind, fault)

    def _fault(self, kind: str, what: str) -> None:
        self.tally.faults.append(f"{kind}: {what[:200]}")

    async def _is_stream(self, kind: str, response: httpx2.Response, count: int = 1) -> bool:
        if response.status_code != 200:
            await response.aread()
        return self._is_answer(kind, response, count)

    def _is_answer(self, kind: str, response: httpx2.Response, count: int = 1) -> bool:
        if response.status_code in (429, 503):
            self.tally.busy += count
        elif response.status_code != 200:
            for _ in range(count):
                self._fault(kind, f"{response.status_code}: {response.text}")
        return response.status_code == 200


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream up to [DONE]. Raises ValueError where it ends without."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise ValueError("the stream ended without [DONE]")
