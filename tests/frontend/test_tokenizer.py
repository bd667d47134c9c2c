"""The wrapper around transformers' tokenizers. Knows nothing of engines."""

import threading

import pytest

from zipage_lang.frontend.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "The fox"}]


def test_encoding_equals_what_transformers_does(tokenizer_dir, tokenizer):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tokenizer_dir)
    text = "<|start|>The lazy dog, größer 你好"
    assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
        reference(text).input_ids, skip_special_tokens=True
    )


def test_a_prompt_gets_the_tokenizers_own_special_tokens(tokenizer_dir):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    pretrained = AutoTokenizer.from_pretrained(tokenizer_dir)
    pretrained.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    tokenizer = Tokenizer(pretrained)
    assert tokenizer.encode("fox")[0] == 1
    assert tokenizer.encode("fox", add_special_tokens=False) == tokenizer.encode("fox")[1:]


def test_chat_is_rendered_by_the_models_own_template(tokenizer):
    rendered = tokenizer.render_chat(MESSAGES)
    assert rendered == "<|start|>user\nThe fox<|end|>\n<|start|>assistant\n"
    assert tokenizer.encode(rendered, add_special_tokens=False)[0] == 1


def test_a_final_message_can_be_left_open(tokenizer):
    messages = [*MESSAGES, {"role": "assistant", "content": "It jumps"}]
    rendered = tokenizer.render_chat(messages, continue_final_message=True)
    assert rendered.endswith("assistant\nIt jumps")


def test_a_model_without_template_says_so(tokenizer_dir):
    from transformers import AutoTokenizer

    pretrained = AutoTokenizer.from_pretrained(tokenizer_dir)
    pretrained.chat_template = None
    with pytest.raises(ValueError, match="no chat template; pass a plain prompt"):
        Tokenizer(pretrained).render_chat(MESSAGES)


def test_messages_that_the_template_refuses_are_a_clear_error(tokenizer_dir):
    from transformers import AutoTokenizer

    pretrained = AutoTokenizer.from_pretrained(tokenizer_dir)
    pretrained.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refused the messages: roles must alternate"):
        Tokenizer(pretrained).render_chat(MESSAGES)


def test_text_that_is_no_string_is_a_clear_error(tokenizer):
    with pytest.raises(ValueError, match="must be a string, not bytes"):
        tokenizer.encode(b"abc")


def test_a_lone_surrogate_is_a_clear_error(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_special_and_end_tokens_are_known(tokenizer):
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == [0]
    assert tokenizer.token_id("<|end|>") == 2
    assert tokenizer.token_id("no such token") is None


def test_token_bytes_join_to_the_text(tokenizer):
    text = "größer 你好 👋"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_missing_gguf_file_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*gone\.gguf"):
        load_tokenizer(tmp_path / "gone.gguf")


def test_many_threads_may_encode_at_once(tokenizer):
    expected = tokenizer.encode("The quick brown fox")
    results = []

    def work():
        results.extend(tokenizer.encode("The quick brown fox") for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 800
