"""A model whose template opens its thoughts, on the real engine: chat and responses, both ways."""

import json
import shutil
from pathlib import Path

import pytest

from zipage_lang.frontend.async_llm import AsyncLLM
from zipage_lang.runtime.config import EngineConfig

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{{ bos_token }}{{ messages[-1].content }}\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
BODY = {
    "messages": [{"role": "user", "content": "solve"}],
    "temperature": 0,
    "max_completion_tokens": 30,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory, make_api):
    import zipage_lang

    model = Path(zipage_lang.__file__).parent / "data" / "zipage-tiny-reasoner"
    folder = tmp_path_factory.mktemp("thinker")
    for path in model.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.suffix == ".json":
            shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig.from_options(model=str(folder), num_threads=1, kv_cache_memory=0.05)
    return make_api(lambda: AsyncLLM.start(config))


def test_a_thought_that_the_template_opens_is_told_apart_in_both_ways(thinker):
    answer = thinker.post(CHAT, **BODY, thinking_token_budget=9)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"]
    assert "think>" not in json.dumps(message)
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == 9 + len("\n</think>\n\n")
    deltas = [
        event["choices"][0]["delta"]
        for event in thinker.events(CHAT, **BODY, thinking_token_budget=9)
    ]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


def test_no_effort_means_no_thought(thinker):
    answer = thinker.post(CHAT, **BODY, reasoning_effort="none")
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == (None, None)
    assert message["content"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_thought_that_is_cut_leaves_no_answer(thinker):
    choice = thinker.post(CHAT, **{**BODY, "max_completion_tokens": 5})["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning"]


def test_an_answer_in_a_form_comes_behind_the_thought(thinker):
    body = {"messages": BODY["messages"], "max_tokens": 60, "thinking_token_budget": 7}
    answer = thinker.post(CHAT, **body, regex="[0-9]{3}", logprobs=True, seed=3)
    choice = answer["choices"][0]
    assert len(choice["message"]["content"]) == 3
    assert choice["message"]["content"].isdigit()
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens) == choice["message"]["content"]


def test_a_responses_thought_is_an_item_before_its_message(thinker):
    answer = thinker.post(
        "/v1/responses",
        input="solve",
        temperature=0,
        max_output_tokens=30,
        thinking_token_budget=9,
        ignore_eos=True,
    )
    thought, message = answer["output"]
    assert thought["type"] == "reasoning"
    chat = thinker.post(CHAT, **BODY, thinking_token_budget=9)["choices"][0]["message"]
    assert thought["content"][0]["text"] == chat["reasoning"]
    assert message["content"][0]["text"] == chat["content"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 9
