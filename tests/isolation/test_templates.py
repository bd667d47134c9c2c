"""A chat template comes with the model and is code: it gets no further than its own text."""

import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from zipage_lang.frontend import template_bounds
from zipage_lang.frontend.template_bounds import bounded_rendering
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.server.openai.conversation import SET_ELSEWHERE

MESSAGES = [{"role": "user", "content": "hello"}]
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__func__.__globals__ }}",
    "by attribute filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "include": "{% include '/etc/passwd' %}",
    "cycler": "{{ cycler.__init__.__globals__.os.environ }}",
    "change of what it is given": "{{ messages.append(1) }}",
    "change of a message": "{{ messages[0].update(content='x') }}",
}

UNDEFINED = ("globals of a function", "by attribute filter")  # what is refused to them is nothing


@pytest.fixture
def with_template(tmp_path):
    """The tiny reasoner's tokenizer with another chat template."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("zipage-tiny-reasoner"), folder)

    def make(template):
        for path in folder.glob("*.jinja"):
            path.unlink()
        path = folder / "tokenizer_config.json"
        described = json.loads(path.read_text())
        path.write_text(json.dumps({**described, "chat_template": template}))
        return load_tokenizer(folder)

    return make


@pytest.mark.parametrize("name", ESCAPES)
def test_no_template_leaves_the_sandbox(with_template, name):
    """It is refused, or what it reaches for is not there and writes nothing."""
    messages = [dict(message) for message in MESSAGES]
    tokenizer = with_template(ESCAPES[name])
    if name in UNDEFINED:
        assert tokenizer.render_chat(messages) == ""
    else:
        with pytest.raises(ValueError, match="the chat template refused the messages"):
            tokenizer.render_chat(messages)
    assert messages == MESSAGES


def test_templates_run_in_the_sandbox_that_changes_nothing():
    """By the library's own words: what compiles a template is jinja's immutable sandbox."""
    compiled = chat_template_utils._compile_jinja_template("{{ messages[0].content }}")
    assert isinstance(compiled.environment, ImmutableSandboxedEnvironment)
    assert compiled.root_render_func.__code__.co_filename == template_bounds.TEMPLATE_FILE


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(99999) %}{% if n %}{{ m(n - 1) }}{% endif %}"
        "{% endfor %}{% endmacro %}{{ m(9) }}",
    ],
    ids=["silent", "talkative", "macros"],
)
def test_a_template_that_would_run_for_ever_is_stopped(with_template, monkeypatch, template):
    """The one bound of time here is the thing itself, made short: without it this never ends."""
    monkeypatch.setattr(template_bounds, "MAX_CPU_S", 0.05)
    with pytest.raises(ValueError, match=r"it ran for more than 0\.05 s"):
        with_template(template).render_chat(MESSAGES)
    assert with_template("{{ messages[0].content }}").render_chat(MESSAGES) == "hello"


def test_a_template_that_writes_without_end_is_refused(with_template, monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_TEXT_LEN", 1000)
    with pytest.raises(ValueError, match="it wrote 2000 characters, more than 1000"):
        with_template("{{ 'a' * 2000 }}").render_chat(MESSAGES)


def test_who_traces_the_thread_goes_on_doing_so():
    """A debugger or a coverage tool is put aside for the rendering and comes back."""
    seen = []

    def tracer(frame, event, argument):
        seen.append(event)

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with bounded_rendering():
            pass
        assert sys.gettrace() is tracer
        with pytest.raises(KeyError), bounded_rendering():
            raise KeyError
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_callers_can_not_bring_a_template_of_their_own():
    """Every argument of the library's call is set by us; a new one would have to be looked at."""
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    named = {
        name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD
    }
    assert named - set(SET_ELSEWHERE) == {"documents"}


def test_a_template_in_a_request_is_refused(with_server):
    async def use(server):
        body = {"messages": MESSAGES, "max_tokens": 1}
        return [
            await server.anna.post(
                "/v1/chat/completions", {**body, "chat_template_kwargs": {name: "{{ 7 * 7 }}"}}
            )
            for name in ("chat_template", "conversation", "tokenizer_kwargs")
        ]

    assert [answer.status_code for answer in with_server(use)] == [400] * 3


def test_the_bundled_models_template_is_rendered_as_before():
    """The bounds change nothing of what a template writes."""
    tokenizer = load_tokenizer(Path(resolve_model("zipage-tiny-reasoner")))
    plain = tokenizer._pretrained.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.render_chat(MESSAGES) == plain
