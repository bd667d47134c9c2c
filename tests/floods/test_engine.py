"""Floods and edges through a whole engine: all end, errors say why, who is beside is not harmed."""

import functools
import json
import threading

import pytest

from zipage_lang.runtime import constraints
from zipage_lang.runtime.grammar_frames import Bounds
from zipage_lang.runtime.grammar_pool import GrammarPool
from zipage_lang.runtime.messages import Abort

ENDLESS = "(abc|def|x[0-9]{3})*" * 3000
HUGE = "start: " + " ".join('"x"~1..9999' for _ in range(500))
AMBIGUOUS = 'root ::= root root root | root root | "1" | "2" | ""'


def flood_through(flooded, count):
    engine = flooded(max_running=128, max_step_tokens=1024, num_blocks=400)
    for index in range(count):
        engine.add(f"r{index}", max_tokens=1 + index % 2, seed=index, tenant=f"t{index % 3}")
    engine.finish()
    assert len(engine.finals) == count
    assert {final.finish_reason for final in engine.finals.values()} == {"length"}
    assert engine.num_steps <= count / 64 + 20  # the most that are let in per step


def test_a_thousand_queued_requests_end(flooded):
    flood_through(flooded, 1_000)


@pytest.mark.slow
def test_ten_thousand_queued_requests_end(flooded):
    flood_through(flooded, 10_000)


def test_ten_thousand_queued_requests_are_aborted_by_one_message(flooded):
    engine = flooded(max_running=8)
    ids = [f"r{index}" for index in range(10_000)]
    for request_id in ids:
        engine.add(request_id, max_tokens=50)
    for _ in range(3):
        engine.step()
    engine.engine.handle(Abort(request_ids=ids))
    engine.finish()
    assert {final.finish_reason for final in engine.finals.values()} == {"abort"}
    assert len(engine.finals) == 10_000
    engine.engine.scheduler.flush_cache()
    assert engine.engine.stats()["num_free"] == 200


def test_one_tenants_ten_short_requests_pass_anothers_crowd(flooded):
    engine = flooded(max_running=8)
    for index in range(60):
        engine.add(f"crowd-{index}", range(5, 45), tenant="crowd", max_tokens=8)
    for _ in range(5):
        engine.step()
    begun_before = len(engine.order_begun)
    for index in range(10):
        engine.add(f"few-{index}", tenant="few", max_tokens=4)
    engine.finish()
    since = engine.order_begun[begun_before:]
    first = since.index("few-0")
    assert first <= 8
    crowd_meanwhile = len([i for i in since[: since.index("few-9")] if i.startswith("crowd")])
    assert crowd_meanwhile <= 8 + 10, "ten of 6 tokens beside those of 48"


@pytest.fixture
def quick_limits(monkeypatch):
    """A grammar may take one second here, so that the test of its end is a short one."""
    bounds = Bounds(max_compile_s=1, max_memory_bytes=2**27)
    limited = functools.partial(GrammarPool, bounds=bounds)
    monkeypatch.setattr(constraints, "GrammarPool", limited)
    return bounds


class HeldUp(GrammarPool):
    """ENDLESS is begun only when `may_begin` is set: no machine is so fast that it ends before."""

    def __init__(self, *args, may_begin, **options):
        super().__init__(*args, **options)
        self._may_begin = may_begin

    def compile(self, source):
        if source.text == ENDLESS:
            self._may_begin.wait(20)
        return super().compile(source)


def test_hostile_grammars_end_with_an_error_each_while_others_go_on(
    flooded, quick_limits, monkeypatch
):
    may_begin = threading.Event()
    held_up = functools.partial(HeldUp, bounds=quick_limits, may_begin=may_begin)
    monkeypatch.setattr(constraints, "GrammarPool", held_up)
    engine = flooded()
    engine.add("warm", regex="[0-9]{3}", max_tokens=20, tenant="good")
    engine.finish()
    assert engine.finals["warm", 0].finish_reason == "stop"
    hostile = {
        "endless": {"regex": ENDLESS},
        "huge": {"lark": HUGE},
        "counted": {"regex": "(([0-9]{1,200}){1,200}){1,200}"},
        "ambiguous": {"ebnf": AMBIGUOUS},
        "left": {"ebnf": 'root ::= root "1" | "1"'},
        "loop": {"json_schema": {"$ref": "#"}},
        "items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 1e9}},
    }
    for name, grammar in hostile.items():
        engine.add(name, tenant="bad", max_tokens=60, ignore_eos=False, **grammar)
    for index in range(20):
        engine.add(f"free-{index}", max_tokens=10, seed=index)
    engine.add("good", regex="[0-9]{4}", max_tokens=20, tenant="good")
    while len([key for key in engine.finals if key[0].startswith("free")]) < 20:
        engine.step()
    assert ("endless", 0) not in engine.finals, "the others waited for it"
    may_begin.set()
    engine.finish()
    assert engine.finals["good", 0].finish_reason == "stop"
    assert engine.error("endless") is not None
    assert engine.error("huge") is not None
    assert {final.error is None for final in engine.finals.values()} == {True, False}
    engine.add("again", lark=HUGE, tenant="bad", ignore_eos=False)
    engine.add("after", regex="[a-z]{2}", max_tokens=20)
    engine.finish()
    assert engine.error("again") is not None
    assert engine.error("after") is None


def test_a_grammar_that_met_a_bound_is_not_tried_again_at_once(flooded, quick_limits, monkeypatch):
    engine = flooded()
    engine.add("first", lark=HUGE, ignore_eos=False)
    engine.finish()
    compiled = []
    monkeypatch.setattr(GrammarPool, "compile", lambda self, source: compiled.append(source))
    engine.add("again", lark=HUGE, ignore_eos=False)
    engine.finish()
    assert engine.error("again") == engine.error("first")
    assert not compiled


def test_requests_with_distinct_grammars_by_the_hundred_all_end(flooded):
    engine = flooded()
    for index in range(150):
        engine.add(f"r{index}", regex=f"[0-9]{{2}}{index}", max_tokens=12, tenant=f"t{index % 4}")
    engine.finish()
    assert len(engine.finals) == 150
    assert {final.error for final in engine.finals.values()} == {None}
    sizes = engine.engine._gate.table_sizes()
    assert set(sizes.values()) == {0}, sizes


@pytest.mark.parametrize(
    ("prompt_len", "num_tokens", "told"),
    [(126, 2, None), (127, 1, None), (128, 0, "128 tokens"), (129, 0, "129 tokens")],
)
def test_prompts_around_the_context_get_what_is_left_or_an_error(
    flooded, prompt_len, num_tokens, told
):
    """The prompt and all output fill the context exactly; a prompt that leaves no room is told."""
    engine = flooded()
    engine.add("edge", [5] * prompt_len, max_tokens=2**31 - 1)
    engine.finish()
    assert len(engine.tokens["edge", 0]) == num_tokens
    if told is None:
        assert engine.finals["edge", 0].finish_reason == "length"
    else:
        assert told in engine.error("edge")
        assert "max_model_len=128 leaves room for 127" in engine.error("edge")


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, True), (2, False)])
def test_the_smallest_pool_that_fits_serves_and_one_block_less_refuses(flooded, num_blocks, fits):
    engine = flooded(num_blocks=num_blocks, block_size=4, swap_space=0)
    for index in range(5):
        engine.add(f"r{index}", [5, 6, 7], max_tokens=10, seed=index)
    engine.finish()
    for index in range(5):
        if fits:
            assert len(engine.tokens[f"r{index}", 0]) == 10
        else:
            assert "may need 3 KV blocks of 4 tokens, but the pool has 2" in engine.error(
                f"r{index}"
            )


def test_more_samples_than_rows_in_a_pool_for_one_at_a_time_all_end(flooded):
    engine = flooded(max_running=4, num_blocks=4, block_size=4, swap_space=0)
    engine.add("many", [5, 6, 7], max_tokens=3, n=128, temperature=1.0, seed=3)
    engine.finish()
    assert len(engine.finals) == 128
    assert {len(tokens) for tokens in engine.tokens.values()} == {3}
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) > 1


def test_twenty_logprobs_of_every_token_of_a_full_context(flooded):
    engine = flooded()
    engine.add("long", [5] * 60, max_tokens=1000, logprobs=20, prompt_logprobs=20)
    engine.finish()
    assert len(engine.tokens["long", 0]) == 68
    assert engine.finals["long", 0].finish_reason == "length"


def test_a_schema_of_a_thousand_levels_is_refused_before_any_engine_sees_it(flooded):
    schema = {}
    for _ in range(1_000):
        schema = {"properties": {"a": schema}}
    engine = flooded()
    for form in (schema, json.dumps({"a": [[]]}).replace("[[]]", "[" * 9_000 + "]" * 9_000)):
        with pytest.raises(ValueError, match="nests more than 64 levels"):
            engine.add("deep", json_schema=form)
    with pytest.raises(ValueError, match="regex has 1000000 bytes; at most 65536"):
        engine.add("long", regex="a" * 1_000_000)
    assert not engine.engine.has_work
