"""Grammars and thinking control on whole engines: exact whatever runs beside, ahead or in between.

Knows nothing of how masks are made.
"""

import json
import re
import time

import pytest

import zipage_lang as zipage
from zipage_lang.frontend.errors import RequestError
from zipage_lang.runtime.messages import Abort, AddRequest, Fork
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.runtime.think_params import ThinkParams

EOS, VOCAB_SIZE = 256, 272
SPECIAL = {EOS: "<|eos|>", 257: "<think>", 258: "</think>", 259: "<tool_call>"}
WORDS = ["ab", "12", "te", "st", "</", ">x", "\\n\\n", "th", "ink", "true", '":', "Ġa"]
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["dot", "line"]},
    },
    "required": ["x", "kind"],
}
DATE = r"\d{4}-\d{2}-\d{2}"
THINK = ThinkParams(max_tokens=7, starts_inside=True)


@pytest.fixture(scope="module")
def tiny(make_tiny_model):
    """A random model over bytes, with a vocabulary that the engine can read."""
    folder, _ = make_tiny_model("Qwen3", vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    vocab |= {word: 260 + index for index, word in enumerate(WORDS)}
    described = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [
            {"id": token_id, "content": text, "special": token_id == EOS}
            for token_id, text in SPECIAL.items()
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


@pytest.fixture
def run(tiny, driver):
    """A driver over the tiny model; small steps and blocks, so that much happens."""

    def make(**options):
        options = {"block_size": 4, "max_model_len": 400, "max_step_tokens": 64, **options}
        return driver(tiny, **options)

    return make


LOADS = {
    "date": {"regex": DATE},
    "point": {"json_schema": POINT, "temperature": 1.5, "top_p": 0.9},
    "points": {"json_schema": POINT, "n": 3, "logprobs": 2, "top_k": 40},
    "nested": {"ebnf": 'root ::= "(" root? ")" | "a"', "max_tokens": 30},
    "thought": {"regex": "(ab)+", "think": THINK, "max_tokens": 40},
    "floored": {"think": ThinkParams(min_tokens=5, max_tokens=9), "max_tokens": 30},
    "unthought": {"json_schema": POINT, "think": ThinkParams(max_tokens=0)},
    "free": {"max_tokens": 20},
    "greedy": {"regex": "[a-f]{8}", "temperature": 0, "repetition_penalty": 1.3},
    "narrow": {"regex": "[ab]{9}", "top_k": 200, "top_p": 0.99, "min_p": 0.01},
    "sum": {"lark": 'start: INT ("+" INT)* "."\n%import common.INT', "presence_penalty": 0.5},
}


def send(engine, names):
    for index, name in enumerate(names):
        prompt = [(7 * index + 3 * place) % 250 for place in range(9 + 5 * index)]
        engine.add(name, prompt, **{"seed": index, "max_tokens": 60, **LOADS[name]})


def results(engine):
    return {
        key: (engine.tokens(*key), outputs[-1].finish_reason, outputs[-1].usage.thinking_tokens)
        for key, outputs in engine.outputs.items()
    }


def alone(run, **options):
    found = {}
    for index, name in enumerate(LOADS):
        engine = run(**options)
        prompt = [(7 * index + 3 * place) % 250 for place in range(9 + 5 * index)]
        engine.add(name, prompt, **{"seed": index, "max_tokens": 60, **LOADS[name]})
        engine.finish()
        found |= results(engine)
    return found


@pytest.fixture(scope="module")
def expected(tiny, driver):
    def make(**options):
        return driver(tiny, block_size=4, max_model_len=400, max_step_tokens=64, **options)

    return alone(make)


def text_of(tokens):
    spelled = {chr(byte): byte for byte in range(0x21, 0x7F)} | {"Ġ": 0x20, "\\": 0x5C, "n": 0x6E}
    words = [bytes(spelled[character] for character in word) for word in WORDS]
    pieces = [bytes([byte]) for byte in range(256)] + [t.encode() for t in SPECIAL.values()] + words
    return b"".join(pieces[t] for t in tokens if t != EOS).decode(errors="replace")


def test_answers_match_their_grammars_and_end_with_stop(expected):
    date, reason, _ = expected["date", 0]
    assert re.fullmatch(DATE, text_of(date))
    assert (reason, date[-1]) == ("stop", EOS)
    for key in (("point", 0), ("points", 0), ("points", 1), ("points", 2)):
        point = json.loads(text_of(expected[key][0]))
        assert point["kind"] in ("dot", "line")
    assert re.fullmatch("[a-f]{8}", text_of(expected["greedy", 0][0]))


def test_thinking_is_bounded_and_counted(expected):
    tokens, _, num_thinking = expected["thought", 0]
    assert text_of(tokens[:num_thinking]).endswith("\n</think>\n\n")
    assert num_thinking == 7 + 4
    assert re.fullmatch("(ab)*a?", text_of(tokens[num_thinking:]))
    tokens, _, num_thinking = expected["floored", 0]
    assert tokens[0] == 257
    assert 6 < num_thinking <= 1 + 9 + 4
    tokens, reason, num_thinking = expected["unthought", 0]
    assert text_of(tokens[:num_thinking]) == "<think>\n</think>\n\n"
    assert json.loads(text_of(tokens[num_thinking:]))["kind"] in ("dot", "line")
    assert reason == "stop"


@pytest.mark.parametrize("overlap", [False, True])
def test_together_they_draw_what_they_draw_alone(run, expected, overlap):
    engine = run(overlap=overlap)
    send(engine, LOADS)
    engine.finish()
    assert results(engine) == expected


@pytest.mark.parametrize("swap_space", [0.0, 0.05], ids=["preempted", "swapped"])
@pytest.mark.parametrize("overlap", [False, True])
def test_displaced_they_draw_what_they_draw_alone(run, expected, overlap, swap_space):
    engine = run(overlap=overlap, swap_space=swap_space, num_blocks=34)
    send(engine, LOADS)
    engine.finish()
    stats = engine.engine.stats()
    assert stats["num_swap_outs" if swap_space else "num_preemptions"] > 0
    assert results(engine) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_with_few_rows_samples_wait_and_draw_the_same(run, expected, overlap):
    engine = run(overlap=overlap, max_running=2)
    send(engine, LOADS)
    engine.finish()
    assert results(engine) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fork_of_a_running_constrained_request_has_a_grammar_of_its_own(run, overlap):
    def children(prompt):
        return [
            AddRequest(
                request_id=f"child-{index}",
                token_ids=prompt,
                sampling=SamplingParams(regex=regex, seed=index, max_tokens=20),
            )
            for index, regex in enumerate([DATE, "(12|ab){3}"])
        ]

    prompt = list(range(20))
    engine = run(overlap=overlap)
    engine.add("parent", prompt, json_schema=POINT, seed=1)
    engine.step()
    while not engine.outputs:
        engine.step()
    engine.engine.handle(Fork(parent_id="parent", children=children([*prompt, *b"at "])))
    engine.finish()
    lone = run()
    for child in children([*prompt, *b"at "]):
        lone.engine.handle(child)
    lone.finish()
    for request_id in ("child-0", "child-1"):
        assert engine.tokens(request_id) == lone.tokens(request_id)
    assert json.loads(text_of(engine.tokens("parent")))


def test_logprobs_are_of_what_could_be_drawn(run):
    engine = run()
    engine.add("r", [1, 2, 3], regex="[ab]", logprobs=5, temperature=0)
    engine.finish()
    first = engine.outputs["r", 0][0].logprobs[0]
    assert {token_id for token_id, _ in first.top} == {ord("a"), ord("b")}
    last = engine.outputs["r", 0][1].logprobs[0]
    assert (last.token_id, last.logprob, last.top) == (EOS, 0.0, [(EOS, 0.0)])


def test_a_free_batch_is_drawn_as_if_there_were_no_grammars(run, monkeypatch):
    """No mask, no wait: not even where an earlier request had a grammar."""
    from zipage_lang.runtime.draws import Draws
    from zipage_lang.runtime.logit_masks import ConstrainedRows

    engine = run(overlap=True)
    engine.add("bound", [1, 2, 3], regex="a")
    engine.finish()

    def forbidden(*arguments):
        raise AssertionError("a free batch was masked or waited for")

    monkeypatch.setattr(ConstrainedRows, "_apply", forbidden)
    monkeypatch.setattr(Draws, "settle", forbidden)
    engine.add("free", [1, 2, 3], max_tokens=5, ignore_eos=True)
    engine.finish()
    assert len(engine.tokens("free")) == 5


def test_a_bad_grammar_gives_one_error_and_the_others_go_on(run):
    engine = run()
    engine.add("bad", [1, 2], regex="a(b", n=2)
    engine.add("impossible", [1, 2], ebnf='root ::= "a" missing')
    engine.add("empty", [1, 2], ebnf="root ::= root")
    engine.add("good", [1, 2], regex="ab")
    engine.finish()
    assert "what the grammar asks for" in engine.final("empty").error
    for key in (("bad", 0), ("bad", 1)):
        assert "at position 1" in engine.final(*key).error
        assert len(engine.outputs[key]) == 1
    assert "line 1, column 14" in engine.final("impossible").error
    assert text_of(engine.tokens("good")) == "ab"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_takes_too_long_to_follow_fails_alone(run, monkeypatch, overlap):
    from zipage_lang.runtime import constraint

    engine = run(overlap=overlap)
    engine.add("free", [1, 2], max_tokens=30, ignore_eos=True)
    engine.add("slow", [1, 2], ebnf='root ::= root root | "a"')
    while ("slow", 0) not in engine.outputs:
        engine.step()
    monkeypatch.setattr(constraint, "MAX_STEP_S", -1.0)
    engine.finish()
    assert "can be read in too many ways" in engine.final("slow").error
    assert len(engine.tokens("free")) == 30


def test_a_model_without_a_vocabulary_refuses_grammars_only(make_tiny_model, driver):
    folder, _ = make_tiny_model("Llama", eos_token_id=5)
    engine = driver(folder)
    engine.add("bound", [1, 2], regex="ab")
    engine.add("free", [1, 2], max_tokens=3, ignore_eos=True)
    engine.finish()
    assert "tokenizer.json" in engine.final("bound").error
    assert len(engine.tokens("free")) == 3


def test_a_model_without_an_end_refuses_grammars(tiny, make_tiny_model, driver):
    folder, _ = make_tiny_model("Llama", vocab_size=VOCAB_SIZE)
    (folder / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    engine = driver(folder)
    engine.add("bound", [1, 2], regex="ab")
    engine.finish()
    assert "names no end-of-sequence token" in engine.final("bound").error


def test_a_request_aborted_while_its_grammar_compiles_is_told_so(run):
    engine = run()
    engine.add("gone", [1, 2], regex="abc", n=2)
    engine.engine.handle(Abort(request_ids=["gone"]))
    engine.finish()
    assert [engine.final("gone", index).finish_reason for index in (0, 1)] == ["abort", "abort"]
    assert not engine.engine.has_work


def test_others_decode_while_a_grammar_compiles(run, monkeypatch):
    from zipage_lang.runtime.grammar import GrammarCompiler

    compiled, compile_now = [], GrammarCompiler.compile

    def compile_slowly(self, source):
        time.sleep(0.5)
        compiled.append(source)
        return compile_now(self, source)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    engine = run()
    engine.add("warm", [1, 2], max_tokens=2, ignore_eos=True)
    engine.finish()
    engine.add("bound", [1, 2], regex="ab")
    engine.add("free", [1, 2], max_tokens=3, ignore_eos=True)
    while ("free", 0) not in engine.outputs or not engine.final("free").is_final:
        engine.step()
    assert not compiled
    engine.finish()
    assert text_of(engine.tokens("bound")) == "ab"


@pytest.fixture(scope="module")
def smollm2_engine():
    with zipage.Engine("smollm2-135m", num_blocks=64, num_threads=1, max_model_len=512) as engine:
        yield engine


def test_smollm2_writes_a_json_object_and_a_date(smollm2_engine):
    prompts = ["A point, as JSON:", "The Berlin Wall fell on the date "]
    sampling = [
        SamplingParams(json_schema=POINT, temperature=0, max_tokens=64),
        SamplingParams(regex=DATE, temperature=0, max_tokens=32),
    ]
    point, date = smollm2_engine.generate(prompts, sampling)
    assert 0 <= json.loads(point.text)["x"] <= 99
    assert re.fullmatch(DATE, date.text)
    assert (point.finish_reason, date.finish_reason) == ("stop", "stop")
    assert (date.thinking, date.answer) == ("", date.text)


def test_smollm2_thinks_within_its_bounds_and_the_parts_are_told_apart(smollm2_engine):
    think = ThinkParams(max_tokens=6, min_tokens=3, starts_inside=True)
    sampling = SamplingParams(regex=r"\d\d?", think=think, temperature=0, stop=["\n"])
    (output,) = smollm2_engine.generate("Two and two. <think>", sampling)
    thought, _, answer = output.text.partition("</think>\n\n")
    assert re.fullmatch(r"\d\d?", answer)
    assert output.answer == answer
    assert output.thinking == thought
    assert output.num_thinking_tokens == output.usage.thinking_tokens >= 3


def test_smollm2_lives_on_after_bad_grammars(smollm2_engine):
    with pytest.raises(RequestError, match="bad regex: missing"):
        smollm2_engine.generate("x", SamplingParams(regex="(a"))
    with pytest.raises(ValueError, match="1000000 bytes"):
        smollm2_engine.generate("x", SamplingParams(regex="a" * 1_000_000))
    (output,) = smollm2_engine.generate("x", SamplingParams(regex="abc", temperature=0))
    assert output.text == "abc"


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_card_draws_the_cpus_answers(run, expected, overlap):
    engine = run(backend="cuda", dtype="float32", overlap=overlap, num_blocks=400)
    send(engine, LOADS)
    engine.finish()
    assert results(engine) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_in_bfloat16_with_graphs_every_answer_matches_its_grammar(
    make_tiny_model, tiny, driver, overlap
):
    folder, _ = make_tiny_model("Qwen3", vocab_size=VOCAB_SIZE, eos_token_id=EOS, head_dim=64)
    (folder / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    engine = driver(folder, backend="cuda", dtype="bfloat16", overlap=overlap, num_blocks=900)
    for index in range(40):
        fields = {"max_tokens": 60, "seed": index, "temperature": 0.5 + index % 3}
        fields |= [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.5}][index % 4]
        engine.add(f"date-{index}", [index] * (3 + index), regex=DATE, **fields)
        engine.add(f"point-{index}", [index] * 5, json_schema=POINT, think=THINK, **fields)
        engine.add(f"free-{index}", [index] * 7, ignore_eos=True, **fields)
    engine.finish()
    for index in range(40):
        assert re.fullmatch(DATE, text_of(engine.tokens(f"date-{index}")))
        num_thinking = engine.final(f"point-{index}").usage.thinking_tokens
        answer = text_of(engine.tokens(f"point-{index}")[num_thinking:])
        point = json.loads(answer.removeprefix("<tool_call>"))  # which random tokens may draw too
        assert 0 <= point["x"] <= 99
        assert len(engine.tokens(f"free-{index}")) == 60
