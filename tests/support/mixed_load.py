"""Clients that never rest: long and short requests, samples, forks, stops and aborts, at random.

Holds the engine to what every client may expect: each sample ends once, without an error, and says
nothing afterwards. Knows nothing of models or devices.
"""

import random

from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import Abort, AddRequest, Fork, Release, Stop, TokenOutput
from zipage_lang.runtime.sampling_params import SamplingParams

Key = tuple[str, int]  # request, sample
KV_CHOICES = [
    None,
    None,
    KVParams(mode="fixed", budget=48, interval=16),
    KVParams(mode="fixed", budget=64, interval=32, protect="none"),
    KVParams(mode="fixed", budget=32, interval=16, policy="streaming"),
    KVParams(mode="adaptive", budget=48, interval=16),
    KVParams(mode="adaptive", budget=32, interval=32, policy="random"),
]


class MixedLoad:
    """Steps an engine and acts between its steps. The seed determines what is asked for."""

    def __init__(self, engine: Engine, seed: int, *, vocab_size: int, max_live: int) -> None:
        self.engine = engine
        self.num_ended = 0
        self.num_forked = 0
        self._rng = random.Random(seed)
        self._vocab_size, self._max_live = vocab_size, max_live
        self._openings = [self._tokens(60) for _ in range(3)]
        self._num_sent = 0
        self._asked: dict[str, AddRequest] = {}  # requests with a sample that has not ended
        self._open: dict[Key, list[int]] = {}  # tokens of each sample that has not ended
        self._held: dict[str, list[int]] = {}  # all tokens of each held state

    def step(self) -> None:
        """Ask for something, perhaps; one step; all laws of the scheduler checked."""
        self._act()
        self._step_engine()

    def burst(self, count: int, max_tokens: int) -> None:
        """Requests that keep all of their KV arrive at once."""
        for _ in range(count):
            sampling = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, seed=self._num_sent, temperature=0.8
            )
            self._send(self._make(self._tokens(10), sampling, KVParams(mode="off")))

    def drain(self) -> None:
        """Half of the clients leave, no new ones come until all have ended, no state is held."""
        leaving = [name for name in sorted(self._asked) if self._rng.random() < 0.5]
        self.engine.handle(Abort(request_ids=leaving))
        while self.engine.has_work:
            self._step_engine()
        self._step_engine()
        assert not self._open, f"never ended: {sorted(self._open)}"
        self.engine.handle(Release(request_ids=list(self._held)))
        self._held.clear()
        self.engine.step()

    def _step_engine(self) -> None:
        for output in self.engine.step():
            self._take(output)
        self.engine.scheduler.check_invariants()

    def _take(self, output: TokenOutput) -> None:
        key = (output.request_id, output.sample_index)
        assert key in self._open, f"{key} had ended, or was never asked for: {output}"
        assert output.error is None, output.error
        assert output.kv.resident_len <= output.kv.logical_len
        self._open[key] += output.token_ids
        if output.is_final:
            self._end(key, output)

    def _end(self, key: Key, output: TokenOutput) -> None:
        tokens, request = self._open.pop(key), self._asked[key[0]]
        self.num_ended += 1
        if output.finish_reason == "length":
            assert len(tokens) == request.sampling.max_tokens
        if request.hold and output.finish_reason != "abort":
            self._held[key[0]] = [*request.token_ids, *tokens]
        if all(other[0] != key[0] for other in self._open):
            del self._asked[key[0]]

    def _act(self) -> None:
        rng = self._rng
        if len(self._open) < self._max_live and rng.random() < 0.5:
            self._send(self._request())
        if self._open and rng.random() < 0.03:
            self._stop(rng.choice(sorted(self._open)))
        if self._open and rng.random() < 0.03:
            self.engine.handle(Abort(request_ids=[rng.choice(sorted(self._asked))]))
        if rng.random() < 0.06:
            self._fork()
        if self._held and rng.random() < 0.05:
            name = rng.choice(sorted(self._held))
            del self._held[name]
            self.engine.handle(Release(request_ids=[name]))

    def _send(self, request: AddRequest) -> None:
        self._expect(request)
        self.engine.handle(request)

    def _expect(self, request: AddRequest) -> None:
        self._asked[request.request_id] = request
        for index in range(request.sampling.n):
            self._open[request.request_id, index] = []

    def _request(self) -> AddRequest:
        rng = self._rng
        opening = rng.choice(self._openings)[: rng.choice([0, 16, 33, 60])]
        prompt = [*opening, *self._tokens(rng.choice([1, 5, 40]))]
        is_long = rng.random() < 0.3
        sampling = self._sampling(rng.randint(120, 300) if is_long else rng.randint(1, 40))
        if not is_long and rng.random() < 0.2:
            sampling = self._sampling(rng.randint(5, 60), n=rng.randint(2, 4))
        return self._make(prompt, sampling, rng.choice(KV_CHOICES))

    def _make(self, prompt: list[int], sampling: SamplingParams, kv: KVParams | None) -> AddRequest:
        self._num_sent += 1
        return AddRequest(
            request_id=f"r{self._num_sent}",
            token_ids=prompt,
            sampling=sampling,
            kv=kv,
            priority=self._rng.choice([0, 0, 0, 1, -1]),
            hold=sampling.n == 1 and self._rng.random() < 0.1,
        )

    def _sampling(self, max_tokens: int, n: int = 1) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=max_tokens,
            n=n,
            seed=self._num_sent,
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([None, None, 2]),
            stop_token_ids=rng.choice([[], [], [3]]),
            ignore_eos=True,
        )

    def _stop(self, key: Key) -> None:
        """As a client that found a stop string some tokens ago."""
        tokens = self._open[key]
        if tokens:
            cut = self._rng.randint(max(1, len(tokens) - 3), len(tokens))
            self.engine.handle(Stop(request_id=key[0], sample_index=key[1], num_output_tokens=cut))

    def _fork(self) -> None:
        """Branches of a held state, or of a request that still runs."""
        states = dict(self._held)
        for name, request in self._asked.items():
            if request.sampling.n == 1 and self._open[name, 0]:
                states[name] = [*request.token_ids, *self._open[name, 0]]
        if not states or len(self._open) > 2 * self._max_live:
            return
        parent = self._rng.choice(sorted(states))
        children = [
            self._make([*states[parent], *self._tokens(2)], self._sampling(20), None)
            for _ in range(self._rng.randint(1, 3))
        ]
        for child in children:
            self._expect(child)
        self.num_forked += len(children)
        self.engine.handle(Fork(parent_id=parent, children=children))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(4, self._vocab_size) for _ in range(count)]
