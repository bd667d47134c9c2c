"""Workers compile as the engine would, end with a grammar that takes too much, and are replaced."""

import json
import os
import signal

import pytest

from zipage_lang.runtime.grammar import (
    GrammarCompiler,
    GrammarError,
    GrammarReader,
    GrammarTooCostly,
    compiled_data,
    new_matcher,
)
from zipage_lang.runtime.grammar_frames import Bounds
from zipage_lang.runtime.grammar_pool import GrammarPool
from zipage_lang.runtime.grammar_source import GrammarSource

EOS = 256
TEXTS = [*(bytes([byte]) for byte in range(256)), b""]
DATE = GrammarSource("regex", r"\d{4}-\d{2}")
ENDLESS = GrammarSource("regex", "(abc|def|x[0-9]{3})*" * 12000)
HUGE = GrammarSource("lark", "start: " + " ".join('"x"~1..9999' for _ in range(500)))
EITHER_BOUND = (
    "took over 1 s to compile|takes more than 256 MiB"  # a fast machine gets to the second first
)


@pytest.fixture(scope="module")
def pool():
    made = GrammarPool(TEXTS, [EOS], Bounds(max_compile_s=1, max_memory_bytes=2**28))
    yield made
    made.close()


@pytest.fixture(scope="module")
def reader():
    return GrammarReader(TEXTS, [EOS])


def is_complete(reader, data, text):
    matcher = new_matcher(reader.read(data))
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(
    "source",
    [
        DATE,
        GrammarSource("ebnf", 'root ::= "(" root? ")" | "a"'),
        GrammarSource("lark", 'start: INT ("+" INT)* "."\n%import common.INT'),
        GrammarSource("json_schema", json.dumps({"type": "object", "properties": {"a": {}}})),
        GrammarSource(
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"const_string","value":"ab"}}',
        ),
    ],
    ids=lambda source: source.kind,
)
def test_a_worker_writes_what_a_compiler_here_would(pool, source):
    here = compiled_data(GrammarCompiler(TEXTS, [EOS]).compile(source))
    assert json.loads(pool.compile(source)) == json.loads(here)


def test_a_fault_is_told_in_the_same_words_and_the_worker_goes_on(pool, reader):
    workers = set(map(id, pool._idle))
    with pytest.raises(GrammarError, match=r"bad regex: missing .* at position 1") as raised:
        pool.compile(GrammarSource("regex", "a(b"))
    assert not isinstance(raised.value, GrammarTooCostly)
    assert is_complete(reader, pool.compile(DATE), "2024-12")
    assert not workers or set(map(id, pool._idle)) == workers


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (ENDLESS, EITHER_BOUND),
        (HUGE, EITHER_BOUND),
    ],
    ids=["endless", "huge"],
)
def test_a_grammar_that_takes_too_much_ends_its_worker_alone(pool, reader, source, told):
    with pytest.raises(GrammarError, match=told) as raised:
        pool.compile(source)
    assert raised.type is GrammarTooCostly
    assert is_complete(reader, pool.compile(DATE), "2024-12")


def test_time_alone_is_bounded_too(reader):
    pool = GrammarPool(TEXTS, [EOS], Bounds(max_compile_s=1, max_memory_bytes=2**34))
    with pytest.raises(GrammarTooCostly, match="took over 1 s to compile"):
        pool.compile(ENDLESS)
    assert is_complete(reader, pool.compile(DATE), "2024-12")
    pool.close()


def test_memory_alone_is_bounded_too(reader):
    pool = GrammarPool(TEXTS, [EOS], Bounds(max_compile_s=60, max_memory_bytes=2**26))
    with pytest.raises(GrammarTooCostly, match="takes more than 64 MiB to compile"):
        pool.compile(HUGE)
    assert is_complete(reader, pool.compile(DATE), "2024-12")
    pool.close()


def test_what_is_too_large_to_send_is_refused_by_its_size():
    pool = GrammarPool(TEXTS, [EOS], Bounds(max_data_bytes=300))
    with pytest.raises(GrammarTooCostly, match=r"the json_schema takes .* MiB when compiled"):
        pool.compile(GrammarSource("json_schema", '{"enum":["a","b","c","d","e"]}'))
    pool.close()


def test_a_pattern_that_takes_seconds_per_token_is_refused_by_trying_it_out(reader):
    """It compiles at once; followed, it would have held up all requests of an engine."""
    texts = [*TEXTS[:256], *(b"abc" * n for n in range(1, 17)), b""]
    pool = GrammarPool(texts, [len(texts) - 1])
    with pytest.raises(GrammarTooCostly, match="can be read in too many ways"):
        pool.compile(GrammarSource("regex", "([a-z]+ ?){1,1000}"))
    pool.close()


def test_a_worker_that_was_killed_while_idle_is_replaced(pool, reader):
    pool.compile(DATE)
    (worker,) = pool._idle
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert is_complete(reader, pool.compile(DATE), "2024-12")


def test_workers_end_with_their_pool():
    pool = GrammarPool(TEXTS, [EOS])
    pool.compile(DATE)
    process = pool._idle[0]._process
    pool.close()
    assert process.returncode is not None
    other = GrammarPool(TEXTS, [EOS])
    other.start_one()
    process = other._idle[0]._process
    del other
    assert process.returncode is not None


@pytest.mark.parametrize(
    "text",
    [
        'root ::= root root root | root root | "a" | "b" | ""',
        "root ::= a0\n"
        + "\n".join(f'a{i} ::= a{i + 1} | a{i + 1} a{i + 1} | ""' for i in range(400))
        + '\na400 ::= "x"',
    ],
    ids=["cubic", "nullable"],
)
def test_an_ambiguous_grammar_is_settled_within_its_bounds(pool, reader, text):
    told = []
    try:
        pool.compile(GrammarSource("ebnf", text))
    except GrammarError as error:
        told.append(str(error))
    assert not told or "too many ways" in told[0] or "took over" in told[0]
    assert is_complete(reader, pool.compile(DATE), "2024-12")
