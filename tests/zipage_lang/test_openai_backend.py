"""Programs on OpenAI-compatible servers: what is sent, what comes back, what can't be."""

import math

import pytest

import zipage_lang as zipage

USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def completion_events(texts, reason="stop", usage=USAGE):
    """Each sample's text letter by letter, interleaved, as /completions streams it."""
    for place in range(max(map(len, texts), default=0)):
        for index, text in enumerate(texts):
            if place < len(text):
                yield {"id": "cmpl-1", "choices": [{"index": index, "text": text[place]}]}
    for index in range(len(texts)):
        yield {"choices": [{"index": index, "text": "", "finish_reason": reason}]}
    yield {"choices": [], "usage": usage}


def chat_events(text):
    yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    for letter in text:
        yield {"choices": [{"index": 0, "delta": {"content": letter}, "finish_reason": None}]}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}


@pytest.fixture
def completions(tiny_server):
    """A backend on /completions that answers all with these texts."""

    def completions(*texts, **options):
        tiny_server.routes["/v1/completions"] = lambda body: completion_events(texts)
        return zipage.OpenAIBackend("small", url=tiny_server.url + "/v1", **options)

    return completions


@pytest.fixture
def chat(tiny_server):
    def chat(text, **options):
        tiny_server.routes["/v1/chat/completions"] = lambda body: chat_events(text)
        return zipage.OpenAIBackend("small", url=tiny_server.url + "/v1", chat=True, **options)

    return chat


def program_of(*parts):
    @zipage.function
    def program(s):
        for part in parts:
            s += part

    return program


class TestCompletions:
    def test_each_call_sends_all_text_so_far(self, completions, tiny_server):
        program = program_of("one", zipage.gen("a", max_tokens=7), "two", zipage.gen("b"))
        state = program.run(backend=completions("é!"), temperature=0.5, seed=3)
        first, second = tiny_server.bodies("/v1/completions")
        assert (first["prompt"], second["prompt"]) == ("one", "oneé!two")
        assert (first["model"], first["max_tokens"], first["temperature"]) == ("small", 7, 0.5)
        assert second["max_tokens"] == 128
        assert state.text() == "oneé!twoé!"

    def test_the_servers_counts_and_reason_stand_in_meta(self, completions):
        state = program_of("q", zipage.gen("a")).run(backend=completions("yes"))
        output = state.meta("a")
        assert (output.usage.prompt_tokens, output.usage.cached_tokens) == (11, 8)
        assert (output.finish_reason, output.request_id) == ("stop", "cmpl-1")

    def test_samples_are_told_apart_and_streamed(self, completions):
        program = program_of("q", zipage.gen("a", n=2), "!")
        state = program.run(backend=completions("yes", "no"), stream=True)
        assert "".join(state.text_iter("a")) == "yes"
        assert state["a"] == ["yes", "no"]
        assert state.text() == "qyes!"

    def test_forks_send_the_prefix_with_each_branch(self, completions, tiny_server):
        @zipage.function
        def program(s):
            s += "p"
            branches = s.fork(2)
            branches += lambda index: str(index) + zipage.gen("v")
            branches.join()

        assert program.run(backend=completions("x"))["v"] == ["x", "x"]
        prompts = {body["prompt"] for body in tiny_server.bodies("/v1/completions")}
        assert prompts == {"p0", "p1"}

    def test_fields_of_its_own_go_where_the_server_has_them(self, completions, tiny_server):
        program = program_of("q", zipage.gen("n", type=int, top_k=3))
        state = program.run(backend=completions("42", extensions=["regex", "top_k"]))
        (body,) = tiny_server.bodies("/v1/completions")
        assert body["top_k"] == 3
        assert "[0-9]" in body["regex"]
        assert state["n"] == 42

    def test_roles_need_the_models_template(self, completions, tiny_server):
        program = program_of(zipage.user("hi"), zipage.assistant(zipage.gen("a")))
        with pytest.raises(zipage.UnsupportedError, match=r"roles.*render="):
            program.run(backend=completions("x"))

        def render(messages, add_generation_prompt):
            told = "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
            return told + ("[assistant]" if add_generation_prompt else "")

        program.run(backend=completions("x", render=render))
        assert tiny_server.bodies("/v1/completions")[0]["prompt"] == "[user]hi\n[assistant]"

    @pytest.mark.parametrize(
        ("part", "what"),
        [
            (zipage.gen("a", kv=zipage.KV(budget=64)), "kv="),
            (zipage.gen("a", regex="[0-9]+"), "regex="),
            (zipage.gen("a", type=int), "regex="),
            (zipage.gen("a", prompt_logprobs=1), "prompt_logprobs="),
            (zipage.gen("a", think={"max_tokens": 5}), "think="),
            (zipage.select("a", ["x"], "unconditional_likelihood_normalized"), "method="),
        ],
    )
    def test_what_it_can_not_do_is_named_where_it_is_appended(
        self, completions, tiny_server, part, what
    ):
        with pytest.raises(zipage.UnsupportedError, match=f"OpenAIBackend can't do {what}"):
            program_of("q", part).run(backend=completions("x"))
        assert tiny_server.requests == []

    def test_a_state_has_no_token_ids_to_show(self, completions):
        state = program_of("q", zipage.gen("a")).run(backend=completions("x"))
        with pytest.raises(zipage.UnsupportedError, match="token_ids"):
            state.token_ids()

    def test_choices_are_scored_by_the_echo(self, completions, tiny_server):
        backend = completions("")
        echoes = {
            "Sky: blue": {"tokens": ["Sky", ":", " blue"], "token_logprobs": [None, -1, -0.5]},
            "Sky: pink": {"tokens": ["Sky", ": ", "pink"], "token_logprobs": [None, -1, -2.0]},
        }

        def echo(body):
            logprobs = dict(echoes[body["prompt"]], text_offset=[0, 3, 4])
            return {"choices": [{"text": body["prompt"] + "x", "logprobs": logprobs}]}

        tiny_server.routes["/v1/completions"] = echo
        program = program_of("Sky:", zipage.select("c", [" blue", " pink"]), "!")
        state = program.run(backend=backend)
        assert state.text() == "Sky: blue!"
        # Of the second choice the token that reaches over its border counts whole.
        assert state.meta("c").logprobs == [[-0.5], [-1, -2.0]]
        scores = program_of("Sky:", zipage.score("c", [" blue", " pink"])).run(backend=backend)["c"]
        assert set(scores.winners.values()) == {" blue"}
        assert math.isclose(scores.probabilities[0], 1 / (1 + math.exp(-2.5)))

    def test_a_server_without_echo_is_named(self, completions, tiny_server):
        backend = completions("")
        tiny_server.routes["/v1/completions"] = lambda body: {"choices": [{"text": "x"}]}
        state = program_of("q", zipage.select("c", ["x", "y"])).run(backend=backend)
        with pytest.raises(zipage.UnsupportedError, match="echoes no logprobs"):
            state["c"]


class TestChat:
    def test_roles_become_messages(self, chat, tiny_server):
        program = program_of(
            zipage.system("be brief"),
            zipage.user("hi"),
            zipage.assistant(zipage.gen("a")),
            zipage.user("more"),
            zipage.assistant(zipage.gen("b")),
        )
        state = program.run(backend=chat("yes"))
        second = tiny_server.bodies("/v1/chat/completions")[1]["messages"]
        assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
        assert [m["content"] for m in second] == ["be brief", "hi", "yes", "more"]
        assert state.meta("a").finish_reason == "length"
        assert state.messages()[-1] == {"role": "assistant", "content": "yes"}

    def test_reasoning_that_the_server_tells_apart_stands_in_meta(self, chat, tiny_server):
        def events(body):
            for delta in ({"reasoning_content": "hm, "}, {"reasoning": "so"}, {"content": "yes"}):
                yield {"choices": [{"index": 0, "delta": delta}]}

        backend = chat("")
        tiny_server.routes["/v1/chat/completions"] = events
        program = program_of(zipage.user("q"), zipage.assistant(zipage.gen("a")))
        state = program.run(backend=backend)
        assert (state["a"], state.meta("a").thinking) == ("yes", "hm, so")
        assert state.messages()[-1]["content"] == "yes"

    def test_text_that_looks_like_marks_stays_text(self, chat, tiny_server):
        program = program_of(zipage.user("<|im_end|>\n"), zipage.assistant(zipage.gen("a")))
        program.run(backend=chat("yes"))
        (message,) = tiny_server.bodies("/v1/chat/completions")[0]["messages"]
        assert message == {"role": "user", "content": "<|im_end|>\n"}

    def test_a_schema_is_its_response_format(self, chat, tiny_server):
        program = program_of(zipage.user("q"), zipage.assistant(zipage.gen("a", type=list[int])))
        assert program.run(backend=chat("[1, 2]"))["a"] == [1, 2]
        (body,) = tiny_server.bodies("/v1/chat/completions")
        assert body["response_format"]["json_schema"]["schema"]["type"] == "array"

    def test_text_outside_of_messages_is_refused(self, chat):
        state = program_of("stray", zipage.user("q"), zipage.assistant(zipage.gen("a"))).run(
            backend=chat("x")
        )
        with pytest.raises(ValueError, match="'stray' stands outside of messages"):
            state["a"]

    def test_a_gen_needs_an_assistant_message(self, chat):
        state = program_of(zipage.user("q" + zipage.gen("a"))).run(backend=chat("x"))
        with pytest.raises(zipage.UnsupportedError, match="outside of an assistant message"):
            state["a"]

    def test_a_begun_reply_needs_a_server_that_goes_on(self, chat, tiny_server):
        program = program_of(zipage.user("q"), zipage.assistant("Well," + zipage.gen("a")))
        with pytest.raises(zipage.UnsupportedError, match="continues=True"):
            program.run(backend=chat("x"))["a"]
        state = program.run(backend=chat(" yes", continues=True))
        body = tiny_server.bodies("/v1/chat/completions")[-1]
        assert body["messages"][-1] == {"role": "assistant", "content": "Well,"}
        assert body["continue_final_message"]
        assert state.messages()[-1]["content"] == "Well, yes"

    def test_select_is_named_where_it_is_appended(self, chat):
        with pytest.raises(zipage.UnsupportedError, match="select or score"):
            program_of(zipage.select("c", ["x", "y"])).run(backend=chat("x"))


def test_an_extension_must_be_a_field_that_is_understood():
    with pytest.raises(ValueError, match="'regexp' is no sampling field"):
        zipage.OpenAIBackend("small", url="http://h/v1", extensions=["regexp"])
    with pytest.raises(ValueError, match="not read back"):
        zipage.OpenAIBackend("small", url="http://h/v1", extensions=["logprobs"])
