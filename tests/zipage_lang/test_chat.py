import pytest

import zipage_lang as zipage
from zipage_lang.chat import ChatTemplate
from zipage_lang.testing import ScriptedBackend, render_chatml


def render_thinking(messages, add_generation_prompt):
    """Like Qwen3: a last assistant message shows an empty thought, a reply is asked without."""
    text = ""
    for number, message in enumerate(messages):
        thought = "<think></think>" if number == len(messages) - 1 else ""
        opening = thought if message["role"] == "assistant" else ""
        text += f"<{message['role']}>{opening}{message['content'].strip()}</s>"
    return text + ("<assistant>" if add_generation_prompt else "")


def render_alternating(messages, add_generation_prompt):
    """Like templates that insist on user and assistant taking turns, and close only replies."""
    text = "<bos>"
    for number, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[number % 2]:
            raise ValueError("roles must alternate")
        wrapped = "[INST]{}[/INST]" if message["role"] == "user" else "{}</s>"
        text += wrapped.format(message["content"])
    return text


def program_of(*messages):
    @zipage.function
    def program(s):
        for message in messages:
            s += message

    return program


@pytest.mark.parametrize("render", [render_chatml, render_alternating])
def test_a_whole_conversation_is_written_as_the_template_writes_it(render):
    contents = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    roles = {"user": zipage.user, "assistant": zipage.assistant}
    program = program_of(*(roles[role](content) for role, content in contents))
    state = program.run(backend=ScriptedBackend(render=render))
    messages = [{"role": role, "content": content} for role, content in contents]
    assert state.text() == render(messages, False)
    assert state.messages() == messages


def test_first_message_brings_the_templates_default_system_message():
    state = program_of(zipage.user("hi")).run(backend=ScriptedBackend())
    assert state.text().startswith(
        "<|im_start|>system\nYou are a script.<|im_end|>\n<|im_start|>user"
    )
    state = program_of(zipage.system("mine"), zipage.user("hi")).run(backend=ScriptedBackend())
    assert "You are a script." not in state.text()


def test_reply_is_asked_with_the_generation_prompt_where_templates_differ():
    backend = ScriptedBackend("yes", render=render_thinking)
    program_of(zipage.user("hi"), zipage.assistant("Sure: " + zipage.gen("a"))).run(backend=backend)
    assert backend.calls[0].prompt == "<user>hi</s><assistant>Sure: "


def test_message_the_author_wrote_opens_as_the_template_shows_messages():
    template = ChatTemplate(render_thinking)
    assert template.prefix(("user",), "assistant") == "<assistant><think></think>"
    assert template.reply_prefix(("user",)) == "<assistant>"
    backend = ScriptedBackend(render=render_thinking)
    state = program_of(zipage.user("hi"), zipage.assistant("done")).run(backend=backend)
    assert state.text() == "<user>hi</s><assistant><think></think>done</s>"


def test_end_token_of_a_reply_stands_once_in_the_next_prompt():
    backend = ScriptedBackend(["yes", "no"])
    program_of(
        zipage.user("a"),
        zipage.assistant(zipage.gen("x")),
        zipage.user("b"),
        zipage.assistant(zipage.gen("y")),
    ).run(backend=backend)
    assert (
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nb<|im_end|>"
        in backend.calls[1].prompt
    )
    assert (
        backend.calls[1].token_ids[: len(backend.calls[0].token_ids)] == backend.calls[0].token_ids
    )


def test_nested_roles_are_an_error_where_they_are_written():
    @zipage.function
    def program(s):
        with s.user():
            s += "question "
            s += zipage.assistant("no")

    with pytest.raises(ValueError, match="assistant message inside a user message"):
        program.run(backend=ScriptedBackend())


def test_closing_what_is_not_open_is_an_error():
    with pytest.raises(ValueError, match="user message closed, but none is open"):
        program_of(zipage.user_end()).run(backend=ScriptedBackend())


def test_a_refused_append_leaves_the_state_as_it_was():
    @zipage.function
    def program(s):
        with pytest.raises(ValueError):
            s += "lost" + zipage.user(zipage.user("nested"))
        s += zipage.user("kept")

    assert program.run(backend=ScriptedBackend()).messages() == [
        {"role": "user", "content": "kept"}
    ]


def test_with_block_and_begin_end_write_the_same_as_the_function():
    @zipage.function
    def blocks(s):
        with s.system():
            s += "be brief"
        with s.user():
            s += "hi"
        with s.assistant():
            s += zipage.gen("a")

    inline = program_of(
        zipage.system("be brief"), zipage.user("hi"), zipage.assistant(zipage.gen("a"))
    )
    begun = program_of(
        zipage.system_begin() + "be brief" + zipage.system_end(),
        zipage.user_begin() + "hi" + zipage.user_end(),
        zipage.assistant_begin() + zipage.gen("a") + zipage.assistant_end(),
    )
    states = [p.run(backend=ScriptedBackend("yes")) for p in (blocks, inline, begun)]
    assert len({state.text() for state in states}) == 1
    assert states[0].messages()[-1] == {"role": "assistant", "content": "yes"}


def test_text_read_inside_an_open_message_is_there():
    @zipage.function
    def program(s):
        with s.assistant():
            s += "so far"
            return s.text()

    assert program.run(backend=ScriptedBackend()).ret_value.endswith("assistant\nso far")


def test_text_outside_of_roles_is_in_the_text_but_in_no_message():
    state = program_of("before ", zipage.user("hi")).run(backend=ScriptedBackend())
    assert state.text().startswith("before ")
    assert state.messages() == [{"role": "user", "content": "hi"}]


def test_templates_own_error_reaches_the_reader():
    backend = ScriptedBackend(render=render_alternating)
    state = program_of(zipage.system("no"), zipage.user("hi" + zipage.gen("a"))).run(
        backend=backend
    )
    with pytest.raises(ValueError, match="roles must alternate"):
        state["a"]


def test_template_that_drops_a_message_is_refused():
    template = ChatTemplate(lambda messages, asks: "nothing")
    with pytest.raises(ValueError, match="chat template does not write"):
        template.prefix((), "user")
