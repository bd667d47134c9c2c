"""What constrained outputs share: tables of tags, and the memory of compiled grammars."""

import types

import pytest
import torch

from zipage_lang.runtime import constraints as module
from zipage_lang.runtime.constraints import Constraints
from zipage_lang.runtime.grammar import GrammarError
from zipage_lang.runtime.grammar_source import GrammarSource
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams
from zipage_lang.runtime.think_tags import ThinkTags
from zipage_lang.runtime.token_bits import num_words, unpack
from zipage_lang.runtime.vocabulary import Vocabulary

TOKENS = (*(bytes([byte]) for byte in range(128)), b"<end>", b"")
EOS = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS}))


@pytest.fixture
def made(monkeypatch):
    """The constraints, and every table of tags that was made for them."""
    tables = []

    def make(*args):
        tables.append(ThinkTags(*args))
        return tables[-1]

    monkeypatch.setattr(module, "ThinkTags", make)
    return Constraints(lambda: VOCABULARY, [EOS]), tables


def thinking(**fields):
    return SamplingParams(think=ThinkParams(tool_starts=(), starts_inside=True, **fields))


def allowed(constraint):
    bits = torch.full((1, num_words(len(TOKENS))), -1, dtype=torch.int32)
    constraint.fill(bits, 0)
    return [token_id for token_id in unpack(bits[0].numpy()) if token_id < len(TOKENS)]


def test_tables_of_tags_are_shared_by_all_caps_and_each_keeps_its_own(made):
    constraints, tables = made
    for cap in range(2 * module.MAX_TAGS):
        sampling = thinking(max_tokens=cap, end_text="<end>")
        constraints.prepare(sampling)
        assert constraints.is_prepared(sampling)
    for cap in range(2 * module.MAX_TAGS):
        sampling = thinking(max_tokens=cap, end_text="<end>")
        assert allowed(constraints.make(sampling, [97] * cap)) == [ord("\n")]  # closing is forced
        if cap > 0:
            assert len(allowed(constraints.make(sampling, [97] * (cap - 1)))) > 1
    floored = constraints.make(thinking(min_tokens=3, end_text="<end>"), [97, 97])
    assert TOKENS.index(b"<end>") not in allowed(floored)
    assert TOKENS.index(b"<end>") in allowed(constraints.make(thinking(end_text="<end>"), [97]))
    assert len(tables) == 1


def test_tables_that_others_push_out_meanwhile_are_made_again(made, monkeypatch):
    """Another thread prepares between the look and the use: nobody may fail of it."""
    constraints, _ = made
    monkeypatch.setattr(module, "MAX_TAGS", 1)
    sampling = thinking(max_tokens=1, end_text="<end>")
    constraints.prepare(sampling)
    is_prepared = constraints.is_prepared

    def is_prepared_then_pushed_out(asked):
        found = is_prepared(asked)
        constraints.prepare(thinking(end_text="<other>"))
        return found

    monkeypatch.setattr(constraints, "is_prepared", is_prepared_then_pushed_out)
    assert allowed(constraints.make(sampling, [97])) == [ord("\n")]
    assert constraints.table_sizes()["think_tags"] == 1


def keep(constraints, name, num_bytes):
    compiled = types.SimpleNamespace(memory_size_bytes=num_bytes)
    constraints._keep(GrammarSource("regex", name), compiled)


@pytest.mark.parametrize("used", [0, 40, 60])
def test_a_new_grammar_takes_the_place_of_any_that_nobody_uses(monkeypatch, used):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    constraints = Constraints(lambda: VOCABULARY, [EOS])
    if used:
        keep(constraints, "used", used)
        assert constraints.hold(SamplingParams(regex="used"))
    keep(constraints, "old", 20)
    keep(constraints, "newer", 20)
    keep(constraints, "new", 100 - used)
    assert constraints.is_prepared(SamplingParams(regex="new"))
    assert constraints.table_sizes()["grammars"] == 1 + bool(used)
    with pytest.raises(GrammarError, match="in use take"):
        keep(constraints, "too large", 101 - used)
