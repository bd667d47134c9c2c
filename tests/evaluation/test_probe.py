"""Texts scored under a bounded cache: as while decoding, token by token."""

import io
import math

import pytest
from rich.console import Console

from zipage_lang.evaluation.grid import FULL, Setting
from zipage_lang.evaluation.inprocess_runner import InProcessRunner
from zipage_lang.evaluation.needle import DEPTHS, needle_figures, needle_texts
from zipage_lang.evaluation.perplexity import perplexity_figures, text_windows
from zipage_lang.evaluation.probe import ProbeText, score_texts
from zipage_lang.evaluation.sweep_progress import SweepProgress
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest, LogprobEntry
from zipage_lang.runtime.sampling_params import SamplingParams

PROMPT = list(range(5, 35))
NUM_DRAWN = 150


@pytest.fixture(scope="module")
def runner(tiny_model):
    return InProcessRunner(
        str(tiny_model), num_threads=1, num_blocks=300, num_query_slots=64, swap_space=0.0
    )


def score(runner, texts, *settings):
    with SweepProgress(Console(file=io.StringIO())) as progress:
        return score_texts(runner, texts, settings, progress)


def setting(policy="zipage", protect="prompt", budget=24, interval=20):
    return Setting(mode="fixed", policy=policy, budget=budget, interval=interval, protect=protect)


def drawn(runner, kv):
    """Tokens drawn from the prompt, their log-probabilities, and how often the cache shrank."""
    engine = runner._engine
    sampling = SamplingParams(
        max_tokens=NUM_DRAWN, temperature=1.0, seed=3, logprobs=0, ignore_eos=True
    )
    engine.handle(AddRequest(request_id="drawn", token_ids=PROMPT, sampling=sampling, kv=kv))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    entries = [entry for output in outputs for entry in output.logprobs or []]
    return [entry.token_id for entry in entries], entries, outputs[-1].kv.compactions


@pytest.mark.parametrize("protect", ["prompt", "none"])
@pytest.mark.parametrize("policy", ["zipage", "streaming"])
def test_each_token_is_scored_as_while_decoding(runner, policy, protect):
    kept = len(PROMPT) if protect == "prompt" else 0
    bounded = setting(policy, protect)
    kv = KVParams(mode="fixed", policy=policy, budget=24, interval=20, protected_len=kept)
    token_ids, entries, num_compactions = drawn(runner, kv)
    assert num_compactions >= 5
    text = ProbeText([*PROMPT, *token_ids], len(PROMPT), len(PROMPT))
    scores = score(runner, [text], FULL, bounded)
    as_decoded = [entry.logprob for entry in entries]
    assert [e.logprob for e in scores[bounded][0]] == pytest.approx(as_decoded, abs=1e-4)
    assert [e.rank for e in scores[bounded][0]] == [e.rank for e in entries]
    assert [e.logprob for e in scores[FULL][0]] != pytest.approx(as_decoded, abs=0.1)


def entries(*logprobs):
    return [LogprobEntry(0, logprob, 1 if logprob > -1 else 2, []) for logprob in logprobs]


def test_perplexity_is_the_exponential_of_the_mean_surprise():
    texts = [ProbeText(list(range(8)), 4, 0), ProbeText(list(range(8)), 4, 0)]
    scores = [entries(-1, -2, -3, -4), entries(-0.5, -0.5, -0.5, -0.5)]
    full = [entries(-1, -1, -1, -1), entries(-0.5, -0.5, -0.5, -0.5)]
    figures = perplexity_figures(texts, scores, full)
    assert figures["nats per token"].value == pytest.approx(1.5)
    assert figures["perplexity"].value == pytest.approx(math.exp(1.5))
    assert figures["nats - full"].value == pytest.approx(0.75)
    assert figures["nats - full"].low == 0.0


def test_the_second_half_of_a_window_has_a_figure_of_its_own():
    texts = [ProbeText(list(range(8)), 2, 0)]
    figures = perplexity_figures(texts, [entries(-9, -9, -1, -1, -2, -2)], [entries(*[-1] * 6)])
    assert figures["perplexity, second half"].value == pytest.approx(math.exp(1.5))


def test_windows_lie_side_by_side_behind_their_prefix():
    windows = text_windows(list(range(100, 200)), 33, 2, [7])
    assert [window.token_ids for window in windows] == [
        [7, *range(100, 132)],
        [7, *range(132, 164)],
    ]
    assert {window.scored_from for window in windows} == {2}
    with pytest.raises(ValueError, match="has 10 tokens, but a window takes 32; lower --window"):
        text_windows(list(range(10)), 33, 2, [7])


def test_a_needle_lies_where_it_should_and_is_asked_for_at_the_end(runner):
    texts = needle_texts(runner.tokenizer, 400, 1, seed=0)
    assert [text.group for text in texts] == ["10%", "30%", "50%", "70%", "90%"]
    for text, depth in zip(texts, DEPTHS, strict=True):
        whole = runner.tokenizer.decode(text.token_ids)
        number = runner.tokenizer.decode(text.token_ids[text.scored_from :]).strip()
        assert whole.count(number) == 2
        assert whole.index(number) / len(whole) == pytest.approx(depth, abs=0.25)
        head = runner.tokenizer.decode(text.token_ids[: text.protected_len])
        assert "remember it" in head
        assert number not in head
    assert needle_texts(runner.tokenizer, 400, 1, seed=0) == texts


def test_a_needle_is_recalled_where_every_token_was_the_likeliest():
    texts = [ProbeText([1, 2, 3], 1, 0, group) for group in ("10%", "90%")]
    scores = [entries(-0.1, -2.0), entries(-0.1, -0.3)]
    figures = needle_figures(texts, scores, [entries(-0.1, -0.1), entries(-0.1, -0.1)])
    assert figures["recalled"].value == 0.5
    assert figures["recalled - full"].value == -0.5
    assert (figures["at 10%"].value, figures["at 90%"].value) == (0.0, 1.0)
    assert figures["nats per token"].value == pytest.approx((1.05 + 0.2) / 2)


def test_a_protected_head_is_kept_only_where_the_setting_says_so(runner):
    text = ProbeText([*PROMPT, *([40, 41, 42, 43] * 30)], len(PROMPT), len(PROMPT))
    kept, dropped = setting("streaming"), setting("streaming", "none")
    scores = score(runner, [text], kept, dropped)
    assert scores[kept] != scores[dropped]
