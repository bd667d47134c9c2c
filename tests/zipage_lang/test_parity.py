"""Programs written for SGLang's frontend, with only the import changed: one row per behaviour.

Each row is a function that must pass; its docstring says the behaviour. Rows marked "ours" differ
on purpose, and say how.
"""

import asyncio
import json
import math
import re
import time
from concurrent.futures import Future

import pytest

import zipage_lang as sgl
from zipage_lang.testing import Reply, ScriptedBackend, StatefulBackend, WordTokenizer

ROWS = []


def row(function):
    ROWS.append(function)
    return function


@pytest.mark.parametrize("check", ROWS, ids=lambda check: check.__name__)
def test_parity(check):
    assert check.__doc__, "a row says its behaviour"
    check()


@pytest.fixture(autouse=True)
def no_default_backend():
    yield
    sgl.set_default_backend(None)


def run(script, *parts, backend=None, **options):
    """A program that appends these parts, on a backend that answers by this script."""

    @sgl.function
    def program(s):
        for part in parts:
            s += part

    return program.run(backend=backend or ScriptedBackend(script), **options)


def sent(*parts, **options):
    """The sampling of the one call that these parts make."""
    backend = ScriptedBackend("42")
    run("", *parts, backend=backend, **options)
    (call,) = backend.calls
    return call.sampling


# Programs: definition, run, run_batch, bind, cache, backends.


@row
def function_takes_any_name_for_the_state():
    """The first parameter is the state; ours: it need not be called s."""
    program = sgl.function(lambda anything, x: anything.append("hi " + x))
    assert program.run("you", backend=ScriptedBackend()).text() == "hi you"


@row
def function_takes_the_word_for_hosted_apis():
    """@function(num_api_spec_tokens=k) is a decorator too; ours: it changes nothing."""

    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "q" + sgl.gen("a")

    assert program.run(backend=ScriptedBackend("x")).text() == "qx"


@row
def run_takes_arguments_by_position_and_name():
    """f.run(*args, **kwargs), with the body's own defaults."""
    program = sgl.function(lambda s, a, b="B": s.append(a + b))
    backend = ScriptedBackend()
    assert program.run("x", backend=backend).text() == "xB"
    assert program.run(a="x", b="y", backend=backend).text() == "xy"


@row
def run_has_default_sampling():
    """128 new tokens at temperature 1 where nobody says otherwise."""
    assert (sent(sgl.gen("a")).max_tokens, sent(sgl.gen("a")).temperature) == (128, 1.0)


@row
def run_sets_defaults_for_its_gens():
    """Sampling given to run holds where a gen does not override it; max_new_tokens is a name."""
    sampling = sent(sgl.gen("a", temperature=0.2), max_new_tokens=7, temperature=0.9, top_p=0.5)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.2, 0.5)


@row
def run_returns_when_all_is_generated():
    """Ours: the state that run returns is complete, not only the body."""
    backend = ScriptedBackend(Reply("slow", token_delay_s=0.005))
    run("", sgl.gen("a"), backend=backend)
    assert (backend.num_running, len(backend.calls)) == (0, 1)


@row
def run_with_stream_returns_at_once():
    """stream=True: the body runs beside the caller."""
    gate = Future()
    backend = ScriptedBackend(Reply("x", gate=gate))
    state = run("", sgl.gen("a"), backend=backend, stream=True)
    assert state.core.variables.find("a") is None or not state.core.variables.find("a").value.done()
    gate.set_result(None)
    assert state["a"] == "x"


@row
def run_keeps_what_the_body_returned():
    """The return value is state.ret_value."""
    program = sgl.function(lambda s: 7)
    assert program.run(backend=ScriptedBackend()).ret_value == 7


@row
def calling_a_program_runs_it():
    """f(...) is f.run(...)."""
    sgl.set_default_backend(ScriptedBackend("x"))
    program = sgl.function(lambda s, q: s.append(q + sgl.gen("a")))
    assert program("q").text() == "qx"


@row
def a_program_called_with_a_state_goes_on_in_it():
    """sub(s, ...) inlines; sub.run(...) is a run of its own."""
    sub = sgl.function(lambda s, q: s.append(q + sgl.gen("a")))
    outer = sgl.function(lambda s: (s.append("first "), sub(s, "q")))
    assert outer.run(backend=ScriptedBackend("x")).text() == "first qx"


@row
def run_batch_takes_dicts_and_tuples_in_order():
    """Items are dicts by name, or lists and tuples by position; results keep the order."""
    program = sgl.function(lambda s, q, tail=".": s.append(q + tail + sgl.gen("a")))
    states = program.run_batch(
        [{"q": "a"}, ("b", "!"), ["c"]], backend=ScriptedBackend(lambda call: call.prompt[::-1])
    )
    assert [state["a"] for state in states] == [".a", "!b", ".c"]


@row
def run_batch_of_nothing_is_empty():
    """[] gives []."""
    assert sgl.function(lambda s: None).run_batch([], backend=ScriptedBackend()) == []


@row
def run_batch_takes_num_threads():
    """ "auto" or a number; one thread runs the bodies one after another."""
    program = sgl.function(lambda s, q: s.append(q + sgl.gen("a")))
    for num_threads in ("auto", 1, 4):
        states = program.run_batch(
            [("a",), ("b",)], num_threads=num_threads, backend=ScriptedBackend("x")
        )
        assert [state.text() for state in states] == ["ax", "bx"]


@row
def run_batch_can_give_results_as_they_end():
    """Ours: run_batch_iter instead of generator_style, with each program's index."""
    program = sgl.function(lambda s, q: s.append(q + sgl.gen("a")))
    ended = dict(program.run_batch_iter([("a",), ("b",)], backend=ScriptedBackend("x")))
    assert [ended[index].text() for index in (0, 1)] == ["ax", "bx"]


@row
def run_batch_has_a_progress_bar():
    """progress_bar=True ticks once for each program that has ended; it changes no result."""
    program = sgl.function(lambda s, q: s.append(q))
    states = program.run_batch([("a",)], progress_bar=True, backend=ScriptedBackend())
    assert states[0].text() == "a"


@row
def bind_fixes_arguments_and_checks_their_names():
    """f.bind(**kw) is a new function."""
    program = sgl.function(lambda s, a, b: s.append(a + b))
    assert program.bind(b="!").run("x", backend=ScriptedBackend()).text() == "x!"
    with pytest.raises(ValueError, match="did you mean"):
        program.bind(aa="x")


@row
def cache_computes_the_text_before_the_first_gen():
    """f.cache() sends it once. Ours: with real arguments, nothing is traced."""
    backend = ScriptedBackend("x")
    program = sgl.function(lambda s, q: s.append("few shots " + q + sgl.gen("a") + sgl.gen("b")))
    assert program.cache("q", backend=backend) == len("few shots q")
    (call,) = backend.calls
    assert (call.prompt, call.sampling.max_tokens) == ("few shots q", 1)


@row
def cache_stops_where_the_body_reads():
    """What comes after the first value is not run."""

    @sgl.function
    def program(s):
        s += "p" + sgl.gen("a")
        s += s["a"] + sgl.gen("b")

    backend = ScriptedBackend("x")
    assert program.cache(backend=backend) == 1
    assert len(backend.calls) == 1


@row
def f_strings_of_arguments_need_no_tracing():
    """Ours: there is no trace(), so that f-strings of arguments just work."""
    program = sgl.function(lambda s, q: s.append(f"Q: {q}" + sgl.gen("a")))
    assert not hasattr(program, "trace")
    assert program.run("why", backend=ScriptedBackend("x")).text() == "Q: whyx"


@row
def a_default_backend_serves_programs_that_name_none():
    """set_default_backend is process-wide."""
    sgl.set_default_backend(ScriptedBackend("x"))
    assert sgl.function(lambda s: s.append(sgl.gen("a"))).run()["a"] == "x"


@row
def the_server_can_be_flushed_and_asked():
    """flush_cache and get_server_info go to the backend."""

    class Administered(ScriptedBackend):
        async def flush_cache(self):
            return {"flushed": 1}

        async def server_info(self):
            return {"model": "script"}

    sgl.set_default_backend(Administered())
    assert sgl.flush_cache() == {"flushed": 1}
    assert sgl.get_server_info()["model"] == "script"
    with pytest.raises(sgl.UnsupportedError, match="flush_cache"):
        sgl.flush_cache(ScriptedBackend())


# Expressions.


@row
def strings_and_expressions_concatenate():
    """+ makes a flat list; += appends."""
    assert run("x", "a" + sgl.gen("v") + "b" + ("c" + sgl.gen("w"))).text() == "axbcx"


@row
def appending_nothing_is_an_error():
    """s += None raises ValueError, at once."""
    with pytest.raises(ValueError, match="None"):
        run("", None)


@row
def gen_takes_all_of_its_parameters():
    """Every name that gen has there is a name here."""
    sampling = sent(
        sgl.gen(
            "a",
            9,
            min_tokens=1,
            n=1,
            stop=["x"],
            stop_token_ids=[5],
            stop_regex=None,
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            ignore_eos=True,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
            dtype=None,
            choices=None,
            choices_method=None,
            regex=None,
            json_schema=None,
        )
    )
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop) == (9, 1, ["x"])
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos) == (4, 0.1, True)


@row
def gen_takes_what_was_missing_too():
    """Ours: all that the engine can, seeds, penalties and bias among it."""
    sampling = sent(sgl.gen("a", seed=3, repetition_penalty=1.1, logit_bias={4: 1.0}))
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.1)


@row
def the_templates_end_of_a_message_ends_a_gen():
    """Even where the model's own end of sequence is another token."""

    class OtherEnd(ScriptedBackend):
        @property
        def eos_token_ids(self):
            return frozenset({999})

    backend = OtherEnd(["yes<|im_end|>never seen", "x"])
    state = run("", sgl.user("q"), sgl.assistant(sgl.gen("a")), sgl.gen("b"), backend=backend)
    assert state["a"] == "yes"
    assert backend.calls[0].sampling.stop_token_ids == [0]
    assert backend.calls[1].sampling.stop_token_ids == []


@row
def stop_ends_a_gen_and_is_no_part_of_it():
    """A string or a list of strings."""
    assert run("one. two", sgl.gen("a", stop="."))["a"] == "one"
    assert run("one. two", sgl.gen("a", stop=["!", "."])).text() == "one"


@row
def stop_regex_ends_a_gen_before_its_match():
    """Looked for as the text comes; what follows is not generated."""
    backend = ScriptedBackend(["step 1 then 22 more", "x"])
    state = run("", "q", sgl.gen("a", stop_regex=r"\d\d"), "!", sgl.gen("b"), backend=backend)
    assert state["a"] == "step 1 then "
    assert backend.calls[1].prompt == "qstep 1 then !"
    assert state.meta("a").stop_reason == "22"


@row
def dtypes_are_fixed_regexes():
    """int, float, bool and str. Ours: the value is parsed; a str is quoted in the text only."""
    for dtype, text, value in ((int, "7", 7), (float, "2.5", 2.5), (bool, "True", True)):
        backend = ScriptedBackend(text)
        state = run("", sgl.gen("a", dtype=dtype), backend=backend)
        assert re.fullmatch(backend.calls[0].sampling.regex, text)
        assert (state["a"], state.text()) == (value, text)
    assert run('"Ada L."', sgl.gen("a", dtype=str))["a"] == "Ada L."


@row
def gen_int_and_gen_string_are_typed_gens():
    """gen with the dtype fixed."""
    state = run(["7", '"Ada"'], sgl.gen_int("i"), sgl.gen_string("s"))
    assert (state["i"], state["s"], state.text()) == (7, "Ada", '7"Ada"')


@row
def regex_and_json_schema_travel():
    """The server enforces them; the value stays text without a type."""
    assert sent(sgl.gen("a", regex="[0-9]+")).regex == "[0-9]+"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert json.loads(sent(sgl.gen("a", json_schema=json.dumps(schema))).json_schema) == schema
    assert run('{"n": 1}', sgl.gen("a", json_schema=schema))["a"] == '{"n": 1}'


@row
def a_bad_regex_is_an_error_where_gen_is_written():
    """It is checked by Python's re."""
    with pytest.raises(ValueError, match="no regular expression"):
        sgl.gen("a", regex="(")


@row
def gen_with_n_gives_a_list_and_goes_on_from_the_first():
    """The variable is a list of n strings."""
    state = run(["one", "two"], "q", sgl.gen("a", n=2), "!")
    assert (state["a"], state.text()) == (["one", "two"], "qone!")


@row
def select_appends_the_likeliest_choice():
    """And stores it; gen(choices=) is the same."""

    def logprob(context, token):
        return -0.1 if token in "blue" else -3.0

    for expr in (
        sgl.select("c", ["red", "blue"], temperature=0.0),
        sgl.gen("c", choices=["red", "blue"], choices_method=sgl.token_length_normalized),
        sgl.select("c", choices=["red", "blue"], choices_method="greedy_token_selection"),
    ):
        state = run("", "Sky: ", expr, backend=ScriptedBackend("", token_logprob=logprob))
        assert (state["c"], state.text()) == ("blue", "Sky: blue")


@row
def select_refuses_a_temperature():
    """Above 1e-5 there is nothing to draw."""
    sgl.select("c", ["a"], temperature=1e-6)
    with pytest.raises(ValueError, match=r"temperature=0\.5"):
        sgl.select("c", ["a"], temperature=0.5)


@row
def roles_write_the_models_template_and_the_messages():
    """Prefix, body, suffix; the message is pushed when the role ends, stripped on its left."""
    backend = ScriptedBackend(" yes")
    state = run("", sgl.user("hi"), sgl.assistant(sgl.gen("a")), backend=backend)
    assert backend.calls[0].prompt.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert state.messages() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


@row
def roles_can_be_opened_and_closed():
    """*_begin() and *_end(), and with s.user():."""

    @sgl.function
    def program(s):
        s += sgl.system_begin() + "be brief" + sgl.system_end()
        with s.user():
            s += "hi"
        s += sgl.assistant_begin()
        s += sgl.gen("a")
        s += sgl.assistant_end()

    messages = program.run(backend=ScriptedBackend("yes")).messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]


@row
def a_missing_system_message_is_the_templates_default():
    """The template inserts it, where it has one."""
    state = run("x", sgl.user("hi"), sgl.assistant(sgl.gen("a")))
    assert state.text().startswith("<|im_start|>system\nYou are a script.<|im_end|>")
    own = run("x", sgl.system("mine"), sgl.user("hi"), sgl.assistant(sgl.gen("a")))
    assert "You are a script." not in own.text()


@row
def nested_roles_are_an_error():
    """Ours: raised where the role is appended."""
    with pytest.raises(ValueError, match="user message inside a system message"):
        run("", sgl.system("a" + sgl.user("b")))


@row
def images_and_videos_say_at_once_that_they_can_not_be():
    """Ours: the engine takes text."""
    with pytest.raises(ValueError, match="text only"):
        sgl.image("cat.png")
    with pytest.raises(ValueError, match="text only"):
        sgl.video("cat.mp4", 8)


@row
def var_scope_stores_all_text_of_a_block():
    """The author's and the generated."""

    @sgl.function
    def program(s):
        s += "before "
        with s.var_scope("x"):
            s += "a" + sgl.gen("v") + "b"
        s += " after"

    state = program.run(backend=ScriptedBackend("-"))
    assert (state["x"], state["v"]) == ("a-b", "-")


@row
def separate_reasoning_splits_thought_and_answer():
    """name keeps the answer, name_reasoning_content gets the thought, which leaves the text."""
    state = run(
        "<think>hm</think>yes",
        sgl.user("q"),
        sgl.assistant(sgl.separate_reasoning("So: " + sgl.gen("a"), model_type="deepseek-r1")),
    )
    assert (state["a"], state["a_reasoning_content"]) == ("yes", "hm")
    assert state.messages()[-1]["content"] == "So: yes"


@row
def separate_reasoning_works_in_streams():
    """Ours: no exception for stream=True."""
    state = run("<think>hm</think>yes", sgl.separate_reasoning(sgl.gen("a")), stream=True)
    assert (state["a"], state["a_reasoning_content"], state.text()) == ("yes", "hm", "yes")


# Choices: the three methods, and what is known of each choice.

SCORES = {"long": [-1.0, -0.1, -0.1], "short": [-0.5]}


def word_logprob(context, token):
    """Logprobs of "l1 l2 l3" and "s1" as in SCORES; by themselves all tokens are even."""
    if not context.startswith("Q"):
        return -1.0
    return {" l1": -1.0, " l2": -0.1, " l3": -0.1, " s1": -0.5}.get(token, -9.0)


def words(expr):
    backend = ScriptedBackend("x", tokenizer=WordTokenizer(), token_logprob=word_logprob)
    return run("", "Q", expr, backend=backend), backend


@row
def token_length_normalized_is_the_default():
    """Highest mean: the long choice with certain ends wins; the first of equals."""
    state, _ = words(sgl.select("c", [" s1", " l1 l2 l3"]))
    assert state["c"] == " l1 l2 l3"
    state, _ = words(sgl.select("c", [" z1", " z2"]))
    assert state["c"] == " z1"


@row
def greedy_token_selection_goes_by_position():
    """The better first token wins, wherever it leads."""
    state, _ = words(sgl.select("c", [" l1 l2 l3", " s1"], "greedy_token_selection"))
    assert state["c"] == " s1"


@row
def unconditional_likelihood_takes_off_what_is_likely_alone():
    """One more request for each choice, without context; a first token counts as it is."""
    state, backend = words(sgl.select("c", [" s1", " z1"], "unconditional_likelihood_normalized"))
    assert state["c"] == " s1"
    assert sorted(call.prompt for call in backend.calls) == [" s1", " z1", "Q s1", "Q z1"]
    assert state.meta("c").unconditional_logprobs == [[0.0], [0.0]]


@row
def all_choices_are_one_batch_on_token_ids():
    """Nobody waits for anybody; each choice is scored from its first token on."""
    state, backend = words(sgl.select("c", [" l1 l2 l3", " s1", " z1"]))
    assert backend.max_running == 3
    assert {call.sampling.prompt_logprobs_start for call in backend.calls} == {1}
    assert state.meta("c").logprobs == [SCORES["long"], SCORES["short"], [-9.0]]


@row
def the_meta_info_of_a_select_has_every_choices_tokens():
    """input_token_logprobs by choice, and their means."""
    state, _ = words(sgl.select("c", [" l1 l2 l3", " s1"]))
    info = state.get_meta_info("c")
    assert [[entry[0] for entry in row] for row in info["input_token_logprobs"]] == [
        SCORES["long"],
        SCORES["short"],
    ]
    assert info["input_token_logprobs"][1][0][2] == " s1"
    assert info["normalized_prompt_logprobs"] == pytest.approx([-0.4, -0.5])


@row
def score_tells_all_and_appends_nothing():
    """Ours: totals, means, distributions and all methods' winners."""
    state, _ = words(sgl.score("c", [" l1 l2 l3", " s1"]))
    scores = state["c"]
    assert state.text() == "Q"
    assert scores.totals == pytest.approx([-1.2, -0.5])
    assert scores.means == pytest.approx([-0.4, -0.5])
    assert scores.probabilities[1] == pytest.approx(1 / (1 + math.exp(-0.7)))
    assert scores.winners == {
        "token_length_normalized": " l1 l2 l3",
        "greedy_token_selection": " s1",
        "unconditional_likelihood_normalized": " l1 l2 l3",
    }
    assert scores.is_exact


# The state.


@row
def values_block_until_they_are_there():
    """s["x"] and get_var."""
    gate = Future()
    state = run(Reply("x", gate=gate), sgl.gen("a"), stream=True)
    gate.set_result(None)
    assert (state["a"], state.get_var("a")) == ("x", "x")


@row
def an_unknown_name_is_a_key_error():
    """At once in a body that ran to its end."""
    with pytest.raises(KeyError, match="nothing"):
        run("x", sgl.gen("a"))["nothing"]


@row
def names_can_be_written_and_looked_for():
    """s["x"] = v and "x" in s, without waiting."""
    program = sgl.function(lambda s: s.__setitem__("k", 3))
    state = program.run(backend=ScriptedBackend())
    assert (state["k"], "k" in state, "z" in state) == (3, True, False)


@row
def text_waits_and_gives_all():
    """The author's text and the generated."""
    state = run(Reply("x", token_delay_s=0.01), "q", sgl.gen("a"), stream=True)
    assert state.text() == "qx"


@row
def messages_leave_out_text_outside_of_roles():
    """Only closed messages are in the list."""
    state = run("x", "stray ", sgl.user("hi"), sgl.assistant_begin(), sgl.gen("a"))
    assert state.messages() == [{"role": "user", "content": "hi"}]


@row
def meta_info_is_the_requests_dict():
    """id, finish_reason, token counts and logprobs; None for a name without a call."""
    program = sgl.function(lambda s: s.append("q" + sgl.gen("a", return_logprob=True, n=2)))
    state = program.run(backend=ScriptedBackend("ab"))
    first, second = state.get_meta_info("a")
    assert first["finish_reason"]["type"] == "stop"
    assert (first["prompt_tokens"], second["completion_tokens"]) == (1, 3)
    assert [entry[2] for entry in first["output_token_logprobs"]][:2] == ["a", "b"]
    assert state.get_meta_info("zzz") is None


@row
def error_says_what_ended_a_state():
    """Waits, then the exception or None."""
    assert run("x", sgl.gen("a")).error() is None
    assert isinstance(run(RuntimeError("no"), sgl.gen("a")).error(), RuntimeError)


@row
def sync_waits_for_the_queue():
    """A barrier that raises nothing."""
    state = run(Reply("x", token_delay_s=0.01), sgl.gen("a"), stream=True)
    state.sync()
    assert state.text() == "x"


@row
def text_iter_streams_by_name():
    """New text as it comes; a name may be asked for before the body has queued it."""
    state = run(["abc", "def"], sgl.gen("a") + sgl.gen("b"), stream=True)
    assert "".join(state.text_iter("b")) == "def"


@row
def text_iter_without_a_name_streams_all_that_is_generated():
    """Ours: without the author's own text, which he knows."""
    state = run(["abc", "def"], "one " + sgl.gen("a") + "two " + sgl.gen("b"), stream=True)
    assert "".join(state.text_iter()) == "abcdef"


@row
def text_iter_of_a_finished_run_gives_it_whole():
    """Without stream=True too."""
    assert "".join(run("abc", sgl.gen("a")).text_iter("a")) == "abc"


@row
def text_iter_raises_what_broke_the_stream():
    """Ours: there and then, not only in error()."""
    state = run(Reply("ab", error=RuntimeError("cut")), sgl.gen("a"), stream=True)
    with pytest.raises(RuntimeError, match="cut"):
        list(state.text_iter("a"))


@row
def text_async_iter_streams_on_any_loop():
    """With return_meta_data each piece comes with what is known of its call so far."""
    state = run("abc", sgl.gen("a"), stream=True)

    async def read():
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)]

    pairs = asyncio.run(read())
    assert "".join(text for text, _ in pairs) == "abc"
    assert pairs[-1][1]["completion_tokens"] >= 3
    assert {meta["name"] for _, meta in pairs} == {"a"}


@row
def fork_copies_everything_so_far():
    """Text, messages, variables and the open role; ours: meta too."""

    @sgl.function
    def program(s):
        s += sgl.user("hi") + sgl.assistant_begin() + "so " + sgl.gen("a")
        first, second = s.fork(2)
        first += "!"
        return first.text(), second.messages(), second["a"], second.meta("a").finish_reason

    text, messages, value, reason = program.run(backend=ScriptedBackend("x")).ret_value
    assert text.endswith("so x!")
    assert (messages, value, reason) == ([{"role": "user", "content": "hi"}], "x", "stop")


@row
def fork_computes_the_prefix_once():
    """Whatever was appended right before."""
    backend = StatefulBackend("x")

    @sgl.function
    def program(s):
        s += "0123456789"
        branches = s.fork(8)
        branches += sgl.gen("v")
        branches.join()

    program.run(backend=backend)
    assert backend.num_computed_tokens < 2 * len("0123456789")


@row
def groups_take_one_expression_a_list_or_a_function():
    """fs += expr, fs += [..], fs += lambda i: expr; fs[i] and fs.states; len and iteration."""

    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += "-"
        forks += ["a", "b", "c"]
        forks += lambda i: str(i)
        forks[1] += "!"
        assert len(forks) == 3
        assert forks.states[0] is forks[0]
        return [fork.text() for fork in forks]

    assert program.run(backend=ScriptedBackend()).ret_value == ["-a0", "-b1!", "-c2"]


@row
def join_gathers_new_variables_as_lists():
    """Each name that the branches wrote; the parent's text stays."""

    @sgl.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: str(i) + sgl.gen("v")
        forks.join("gather_variable")

    state = program.run(backend=ScriptedBackend({"p0": "x", "p1": "y"}))
    assert (state["v"], state.text()) == (["x", "y"], "p")


@row
def join_can_append_the_branches_texts():
    """ "concate_and_append": what each said since the fork, token by token."""

    @sgl.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += lambda i: f"<{i}>" + sgl.gen("v")
        forks.join("concate_and_append")
        s += "end"

    assert program.run(backend=ScriptedBackend("x")).text() == "p<0>x<1>xend"


@row
def copy_is_a_branch_whose_values_come_back_as_lists_of_one():
    """with s.copy() as t:."""

    @sgl.function
    def program(s):
        s += "p"
        with s.copy() as t:
            t += "aside" + sgl.gen("v")
        s += "on"

    state = program.run(backend=ScriptedBackend("x"))
    assert (state["v"], state.text()) == (["x"], "pon")


@row
def copy_works_in_async_programs():
    """async with s.copy() as t:."""

    async def body(s):
        async with s.copy() as t:
            t += "aside" + sgl.gen("v")
        return s["v"]

    async def read(s):
        return await (await body(s))

    assert sgl.function(read).run(backend=ScriptedBackend("x")).ret_value == ["x"]


@row
def many_branches_take_no_threads():
    """Ours: states are coroutines of one loop."""
    import threading

    before = threading.active_count()
    seen = []

    @sgl.function
    def program(s):
        forks = s.fork(64)
        forks += sgl.gen("v")
        time.sleep(0.02)
        seen.append(threading.active_count())
        forks.join()

    program.run(backend=ScriptedBackend(Reply("x" * 20, token_delay_s=0.002)))
    assert max(seen) <= before + 3
