"""The sampler against one row at a time in plain Python, and its promises about seeds and state."""

import dataclasses
import math
import types

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.kernels.reference import sampling as kernels
from zipage_lang.runtime.sampler import SCORED_LINES, Sampler
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.step_plan import RowSetup, TokenLogprobs

VOCAB = 24
EOS = (2, 5)


def make_sampler(max_rows=8, vocab_size=VOCAB, backend=kernels, device="cpu"):
    return Sampler(
        max_rows=max_rows,
        vocab_size=vocab_size,
        eos_token_ids=EOS,
        backend=backend,
        device=torch.device(device),
    )


def set_up(sampler, row, *, seed=0, token_ids=(1, 3, 4), num_prompt=None, **fields):
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    sampling = SamplingParams(**fields)
    sampler.set_up_row(RowSetup(row, tuple(token_ids), num_prompt, sampling, seed))


def random_logits(seed, *shape, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def run_row(sampler, row, steps, first_step=0):
    """Draw `steps` tokens for one row; the logits of a step depend on the step alone."""
    return [
        sampler.draw(random_logits(first_step + step, 1, VOCAB), [row]).samples()[0]
        for step in range(steps)
    ]


@dataclasses.dataclass
class SlowRow:
    """What a row should draw, one token at a time. `margin` tells how clear the last choice was."""

    sampling: SamplingParams
    seed: int
    prompt: list[int]
    output: list[int] = dataclasses.field(default_factory=list)
    margin: float = math.inf

    def draw(self, raw):
        values, sampling = self.edited(raw), self.sampling
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        self.margin = math.inf
        if sampling.temperature == 0:
            return order[0]
        kept = self.kept(values, order)
        if not 0 < sampling.top_k < len(values) and sampling.top_p == 1.0:
            kept.sort()  # nothing was sorted, so the draw walks the vocabulary
        return self.pick(kept)

    def edited(self, raw):
        sampling, values = self.sampling, [np.float32(value) for value in raw]
        for token_id, bias in (sampling.logit_bias or {}).items():
            values[token_id] += np.float32(bias)
        if len(self.output) < sampling.min_tokens:
            for token_id in (*EOS, *sampling.stop_token_ids):
                values[token_id] = np.float32(-math.inf)
        repetition = np.float32(sampling.repetition_penalty)
        for token_id in set(self.prompt + self.output):
            value = values[token_id]
            values[token_id] = value * repetition if value < 0 else value / repetition
        for token_id in set(self.output):
            values[token_id] -= np.float32(sampling.presence_penalty)
            count = np.float32(self.output.count(token_id))
            values[token_id] -= np.float32(sampling.frequency_penalty) * count
        return [float(value) for value in values]

    def kept(self, values, order):
        sampling = self.sampling
        if sampling.top_k > 0:
            order = order[: sampling.top_k]
        best = values[order[0]]
        share = {i: math.exp((values[i] - best) / sampling.temperature) for i in order}
        total, before, kept = sum(share.values()), 0.0, []
        for token_id, part in share.items():
            if sampling.top_p < 1.0:
                self.margin = min(self.margin, abs(before / total - sampling.top_p))
            if sampling.min_p > 0.0:
                self.margin = min(self.margin, abs(part - sampling.min_p))
            if before / total < sampling.top_p and part >= sampling.min_p:
                kept.append((token_id, part))
            before += part
        return kept

    def pick(self, kept):
        position = torch.tensor([len(self.output)])
        uniform = kernels.random_uniform(torch.tensor([self.seed]), position).item()
        total, reach = sum(part for _, part in kept), 0.0
        for token_id, part in kept:
            edge = (reach + part) / total
            self.margin = min(self.margin, abs(uniform - edge))
            if uniform < edge:
                return token_id
            reach += part
        raise AssertionError("the running sum must reach 1")

    def scores(self, raw, token_id):
        if self.sampling.logprobs is None:
            return None
        values = [float(value) for value in raw]
        lse = math.log(sum(math.exp(value) for value in values))
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        top = tuple((i, values[i] - lse) for i in order[: self.sampling.logprobs])
        return TokenLogprobs(token_id, values[token_id] - lse, order.index(token_id) + 1, top)


token_ids = st.integers(0, VOCAB - 1)
any_sampling = st.builds(
    SamplingParams,
    min_tokens=st.integers(0, 4),
    temperature=st.one_of(st.just(0.0), st.floats(0.1, 3.0)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1.0)),
    top_k=st.integers(-1, VOCAB + 2),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.3]),
    stop_token_ids=st.lists(token_ids, max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.one_of(st.none(), st.integers(0, 5)),
    logit_bias=st.one_of(st.none(), st.dictionaries(token_ids, st.floats(-5, 5), max_size=3)),
)
any_row = st.tuples(
    any_sampling, st.integers(-(2**63), 2**63 - 1), st.lists(token_ids, min_size=1, max_size=6)
)


def assert_same_scores(found, wanted):
    if wanted is None:
        assert found is None
        return
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(any_row, min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5]),
    st.randoms(use_true_random=False),
)
def test_mixed_batches_equal_one_slow_row_at_a_time(row_specs, logits_seed, grid, random):
    sampler, rng = make_sampler(), np.random.default_rng(logits_seed)
    slow = {}
    for row, (sampling, seed, prompt) in zip(
        random.sample(range(8), len(row_specs)), row_specs, strict=True
    ):
        slow[row] = SlowRow(sampling, seed, prompt)
        sampler.set_up_row(RowSetup(row, tuple(prompt), len(prompt), sampling, seed))
    for _ in range(6):
        rows = random.sample(sorted(slow), random.randint(1, len(slow)))
        logits = rng.normal(size=(len(rows), VOCAB)).astype(np.float32) * 2
        if grid:
            logits = (np.round(logits / grid) * grid).astype(np.float32)  # ties
        samples = sampler.draw(torch.from_numpy(logits), rows).samples()
        assert [sample.row for sample in samples] == rows
        for raw, sample in zip(logits, samples, strict=True):
            wanted = slow[sample.row].draw(raw)
            if slow[sample.row].margin > 1e-5:
                assert sample.token_id == wanted
            assert_same_scores(sample.logprobs, slow[sample.row].scores(raw, sample.token_id))
            slow[sample.row].output.append(sample.token_id)


STREAMS = {
    "plain": {},
    "min_p": {"min_p": 0.02, "logprobs": 3},
    "top_k": {"top_k": 5},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "penalties": {"top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {7: 4.0}, "min_tokens": 9, "logprobs": 0},
    "greedy": {"temperature": 0.0, "presence_penalty": 1.5},
}


@pytest.mark.parametrize("name", STREAMS)
def test_samples_do_not_depend_on_row_or_neighbours(name):
    alone = make_sampler()
    set_up(alone, 0, seed=42, **STREAMS[name])
    wanted = run_row(alone, 0, 12)

    crowded = make_sampler()
    set_up(crowded, 6, seed=42, **STREAMS[name])
    for row, fields in enumerate(STREAMS.values()):
        if row != 6:
            set_up(crowded, row, seed=1000 + row, **fields)
    for step, sample in enumerate(wanted):
        neighbours = [row for row in range(6) if (row + step) % 3]
        rows = [*neighbours[:step], 6, *neighbours[step:]]
        logits = random_logits(100 + step, len(rows), VOCAB)
        logits[rows.index(6)] = random_logits(step, 1, VOCAB)[0]
        found = crowded.draw(logits, rows).samples()[rows.index(6)]
        assert found == msgspec.structs.replace(sample, row=6)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_row_set_up_with_its_output_resumes_its_stream(name, num_before):
    whole = make_sampler()
    set_up(whole, 0, seed=9, token_ids=(1, 3, 4), **STREAMS[name])
    wanted = [sample.token_id for sample in run_row(whole, 0, 10)]

    resumed = make_sampler()
    set_up(resumed, 4, seed=77, repetition_penalty=3.0)  # an earlier owner, to be forgotten
    run_row(resumed, 4, 3)
    known = (1, 3, 4, *wanted[:num_before])
    set_up(resumed, 4, seed=9, token_ids=known, num_prompt=3, **STREAMS[name])
    found = run_row(resumed, 4, 10 - num_before, first_step=num_before)
    assert [sample.token_id for sample in found] == wanted[num_before:]


def test_seeds_fold_to_64_bits_and_differ_otherwise():
    def stream(seed):
        sampler = make_sampler()
        set_up(sampler, 0, seed=seed, temperature=3.0)
        return [sample.token_id for sample in run_row(sampler, 0, 16)]

    assert stream(5) == stream(5 + 2**64) == stream(5 - 2**64)
    assert stream(-1) == stream(2**64 - 1)
    assert len({tuple(stream(seed)) for seed in range(-10, 10)}) == 20


def test_draw_leaves_the_logits_alone():
    sampler, logits = make_sampler(), random_logits(0, len(STREAMS), VOCAB)
    before = logits.clone()
    for row, fields in enumerate(STREAMS.values()):
        set_up(sampler, row, **fields)
    sampler.draw(logits, range(len(STREAMS)))
    assert torch.equal(logits, before)


def test_last_tokens_are_those_of_the_setup_then_those_drawn():
    sampler = make_sampler()
    set_up(sampler, 1, token_ids=(4, 9))
    set_up(sampler, 3, token_ids=(7,))
    assert sampler.last_token_ids.tolist() == [0, 9, 0, 7, 0, 0, 0, 0]
    draws = sampler.draw(random_logits(0, 1, VOCAB), [3])
    assert sampler.last_token_ids[1] == 9
    assert sampler.last_token_ids[3] == draws.token_ids[0] == draws.samples()[0].token_id


def refuse(*_args):
    raise AssertionError("not needed for this batch")


def test_greedy_batch_calls_no_kernel_but_the_draw(monkeypatch):
    for name in ("random_uniform", "draw_tokens", "draw_filtered_tokens"):
        monkeypatch.setattr(kernels, name, refuse)
    sampler = make_sampler(backend=types.SimpleNamespace(draw_rows=kernels.draw_rows))
    for row in range(3):
        set_up(sampler, row, temperature=0.0, top_p=0.5, top_k=3, seed=row)
    logits = random_logits(0, 3, VOCAB)
    assert sampler.draw(logits, [0, 1, 2]).token_ids.tolist() == logits.argmax(-1).tolist()


def test_batch_without_top_k_and_top_p_is_not_sorted(monkeypatch):
    monkeypatch.setattr(kernels, "draw_filtered_tokens", refuse)
    bounds = []

    def draw_rows(logits, rows, row_settings, max_top_k):
        bounds.append(max_top_k)
        return kernels.draw_rows(logits, rows, row_settings, max_top_k)

    sampler = make_sampler(backend=types.SimpleNamespace(draw_rows=draw_rows))
    set_up(sampler, 0, temperature=0.0)
    set_up(sampler, 1, min_p=0.1)
    set_up(sampler, 2, temperature=0.0, top_k=3)
    set_up(sampler, 3, top_k=3)
    sampler.draw(random_logits(0, 3, VOCAB), [0, 1, 2]).samples()
    assert bounds == [0]  # what tells a backend on a card that no line needs an order
    with pytest.raises(AssertionError, match="not needed"):
        sampler.draw(random_logits(0, 2, VOCAB), [0, 3])
    assert bounds == [0, 3]


def draw_rows_of_a_card(logits, rows, row_settings, max_top_k):
    """Shapes and dtypes of a draw; the CPU's own may look at values, so it cannot stand in."""
    return torch.empty((2, len(rows)), dtype=torch.int64, device=logits.device)


def test_draw_never_waits_for_the_device():
    card = types.SimpleNamespace(
        draw_rows=draw_rows_of_a_card,
        penalize=kernels.penalize,
        score_tokens=kernels.score_tokens,
    )
    sampler = make_sampler(device="meta", backend=card)  # reading a meta tensor's value raises
    for row, fields in enumerate(STREAMS.values()):
        set_up(sampler, row, **fields)
    for _ in range(2):
        logits = torch.empty(len(STREAMS), VOCAB, device="meta")
        draws = sampler.draw(logits, range(len(STREAMS)))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        draws.samples()


def test_greedy_takes_the_first_of_equal_logits():
    sampler = make_sampler()
    set_up(sampler, 0, temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 11, 20]] = 3.0
    assert sampler.draw(logits, [0]).token_ids.tolist() == [5]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_narrowest_filter_equals_greedy(fields):
    sampler = make_sampler()
    set_up(sampler, 0, temperature=2.0, **fields)
    for step in range(20):
        logits = random_logits(step, 1, VOCAB)
        assert sampler.draw(logits, [0]).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_neutral_filter_changes_nothing(fields):
    plain, neutral = make_sampler(), make_sampler()
    set_up(plain, 0, seed=3, temperature=1.5)
    set_up(neutral, 0, seed=3, temperature=1.5, **fields)
    assert run_row(plain, 0, 20) == run_row(neutral, 0, 20)


def test_top_k_of_the_whole_vocabulary_can_draw_every_token():
    sampler = make_sampler()
    set_up(sampler, 0, temperature=100.0, top_k=10 * VOCAB)
    assert {sample.token_id for sample in run_row(sampler, 0, 400)} == set(range(VOCAB))


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_token_that_ends_the_output(ignore_eos, temperature):
    sampler = make_sampler()
    fields = {"ignore_eos": ignore_eos, "temperature": temperature, "stop_token_ids": [9, 2]}
    set_up(sampler, 0, min_tokens=3, **fields)
    for step in range(5):
        logits = torch.zeros(1, VOCAB)
        logits[0, [*EOS, 9]] = 60.0
        token_id = sampler.draw(logits, [0]).samples()[0].token_id
        assert (token_id in (*EOS, 9)) == (step >= 3)


def test_min_tokens_counts_the_output_a_row_starts_with():
    sampler = make_sampler()
    set_up(sampler, 0, token_ids=(1, 7, 8), num_prompt=1, min_tokens=3, temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS[0]] = 1.0
    drawn = [sampler.draw(logits, [0]).token_ids.item() for _ in range(2)]
    assert drawn == [0, EOS[0]]


def test_logit_bias_forbids_and_forces_tokens():
    sampler = make_sampler()
    set_up(sampler, 0, logit_bias={13: 100.0})
    set_up(sampler, 1, logit_bias=dict.fromkeys(range(VOCAB - 2), -100.0))
    for step in range(20):
        forced, left = sampler.draw(random_logits(step, 2, VOCAB), [0, 1]).token_ids.tolist()
        assert forced == 13
        assert left in (VOCAB - 2, VOCAB - 1)


def test_ids_beyond_the_vocabulary_are_ignored():
    plain, beyond = make_sampler(), make_sampler()
    set_up(plain, 0, seed=1, min_tokens=2)
    set_up(beyond, 0, seed=1, min_tokens=2, logit_bias={VOCAB: 9.0}, stop_token_ids=[VOCAB + 5])
    assert run_row(plain, 0, 5) == run_row(beyond, 0, 5)


def test_repetition_penalty_sees_the_prompt_and_the_others_do_not():
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 2.0, 1.9
    sampler = make_sampler()
    set_up(sampler, 0, token_ids=(8,), temperature=0.0, repetition_penalty=1.2)
    set_up(sampler, 1, token_ids=(8,), temperature=0.0, presence_penalty=1.0)
    set_up(sampler, 2, token_ids=(8,), temperature=0.0, frequency_penalty=0.06)
    lines = logits.expand(3, -1)
    assert sampler.draw(lines, [0, 1, 2]).token_ids.tolist() == [9, 8, 8]
    assert sampler.draw(lines, [0, 1, 2]).token_ids.tolist() == [8, 9, 8]
    assert sampler.draw(lines, [0, 1, 2]).token_ids.tolist() == [8, 8, 9]


def test_counts_of_many_owners_in_turn_stay_apart():
    """Rows with and without penalties come and go; each sees only its own tokens."""
    sampler = make_sampler(max_rows=6)
    for turn in range(30):
        row, token_id = turn % 6, turn % VOCAB
        fields = {"presence_penalty": 2.0} if turn % 4 else {}
        known = (0, token_id, (token_id + 1) % VOCAB)
        set_up(sampler, row, token_ids=known, num_prompt=1, temperature=0.0, **fields)
        logits = torch.zeros(1, VOCAB)
        logits[0, list(known[1:])], logits[0, (token_id + 2) % VOCAB] = 2.0, 1.0
        wanted = (token_id + 2) % VOCAB if fields else min(known[1:])
        assert sampler.draw(logits, [row]).token_ids.tolist() == [wanted]


def test_memory_for_counts_is_held_for_penalised_rows_only():
    sampler = make_sampler(max_rows=1000)
    for row in range(1000):
        set_up(sampler, row, presence_penalty=1.0 if row < 3 else 0.0)
    assert sum(t.shape[0] for t in (sampler._counts.in_prompt, sampler._counts.generated)) <= 16


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", STREAMS)
def test_broken_logits_give_their_row_an_error_and_the_others_a_token(bad, name):
    sampler = make_sampler()
    for row in (2, 4, 5):
        set_up(sampler, row, **STREAMS[name])
    logits = random_logits(0, 3, VOCAB)
    logits[1, 6] = bad
    first, broken, last = sampler.draw(logits, [2, 5, 4]).samples()
    assert broken.row == 5
    assert "NaN" in broken.error
    assert first.error is None
    assert last.error is None
    assert sampler.last_token_ids.min() >= 0
    assert sampler.last_token_ids.max() < VOCAB


def test_row_with_every_token_suppressed_gets_an_error():
    sampler = make_sampler()
    set_up(sampler, 0, min_tokens=1, stop_token_ids=list(range(VOCAB)))
    (sample,) = sampler.draw(random_logits(0, 1, VOCAB), [0]).samples()
    assert "every token is suppressed" in sample.error


def test_logprobs_are_of_the_logits_before_bias_penalty_and_temperature():
    sampler, logits = make_sampler(), random_logits(4, 1, VOCAB)
    set_up(sampler, 0, temperature=0.0, logit_bias={17: 100.0}, logprobs=2, repetition_penalty=9.0)
    found = sampler.draw(logits, [0]).samples()[0].logprobs
    wanted = torch.log_softmax(logits[0], -1)
    assert found.logprob == pytest.approx(wanted[17].item(), abs=1e-6)
    assert found.rank == 1 + int((logits[0] > logits[0, 17]).sum())
    assert [token_id for token_id, _ in found.top] == logits[0].topk(2).indices.tolist()


def test_logprobs_of_each_row_have_the_length_it_asked_for():
    sampler = make_sampler()
    for row, wanted in enumerate([None, 0, 3, 20]):
        set_up(sampler, row, logprobs=wanted)
    samples = sampler.draw(random_logits(0, 4, VOCAB), range(4)).samples()
    assert samples[0].logprobs is None
    assert [len(sample.logprobs.top) for sample in samples[1:]] == [0, 3, 20]


@pytest.mark.parametrize("num_positions", [0, 1, SCORED_LINES, 2 * SCORED_LINES + 3])
def test_prompt_scores_equal_a_slow_loop(num_positions):
    logits = random_logits(1, num_positions, VOCAB)
    next_ids = torch.arange(num_positions) % VOCAB
    found = make_sampler().score_prompt(logits, next_ids, 3)
    assert len(found) == num_positions
    for raw, token_id, scores in zip(logits, next_ids.tolist(), found, strict=True):
        slow = SlowRow(SamplingParams(logprobs=3), 0, [0])
        assert_same_scores(scores, slow.scores(raw, token_id))


def test_draw_of_no_rows_yields_no_samples():
    assert make_sampler().draw(torch.zeros(0, VOCAB), []).samples() == ()


@pytest.mark.parametrize(
    ("logits", "rows"),
    [
        (torch.zeros(2, VOCAB), [0]),
        (torch.zeros(1, VOCAB + 1), [0]),
        (torch.zeros(2, VOCAB), [0, 0]),
        (torch.zeros(1, VOCAB, dtype=torch.float64), [0]),
    ],
)
def test_wrong_batch_is_refused(logits, rows):
    sampler = make_sampler()
    set_up(sampler, 0)
    with pytest.raises(AssertionError):
        sampler.draw(logits, rows)
