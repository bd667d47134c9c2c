"""Bad input is refused with the value and the fix. Knows nothing of engines."""

import pytest

from zipage_lang.frontend.input_checks import check_prompt, check_request, check_text_len
from zipage_lang.runtime.messages import AddRequest, Ready
from zipage_lang.runtime.sampling_params import SamplingParams

READY = Ready(
    model="m",
    model_path="p",
    architecture="a",
    backend="cpu",
    max_model_len=10,
    vocab_size=50,
    eos_token_ids=[0],
    num_blocks=1,
    block_size=16,
)


def test_a_good_prompt_comes_back_as_a_list():
    assert check_prompt((1, 2, 49), READY) == [1, 2, 49]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1] * 10, "10 tokens, but .* max_model_len=10; shorten the prompt"),
        ([1, 50], "token id 50; this model's ids go from 0 to 49"),
        ([-1], "token id -1"),
        ([1.0], "1.0; token ids must be whole numbers"),
        ([True], "True; token ids must be whole numbers"),
        (["a"], "'a'; token ids must be whole numbers"),
        (5, "a string or a list of token ids, not int"),
        (None, "not NoneType"),
        (b"abc", "not bytes"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(prompt, READY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling": {"n": 1}}, "must be a SamplingParams"),
        ({"sampling": SamplingParams(stop_token_ids=[50])}, "stop_token_ids contains token id 50"),
        ({"sampling": SamplingParams(logit_bias={77: 1.0})}, "logit_bias contains token id 77"),
        ({"kv": {"mode": "off"}}, "must be a KVParams or None"),
        ({"request_id": ""}, "request_id='' must be a string that is not empty"),
        ({"request_id": 5}, "request_id=5"),
        ({"priority": 1.5}, "priority=1.5 must be a whole number"),
        ({"namespace": None}, "namespace=None must be a string"),
        ({"group_id": 3}, "group_id=3 must be a string"),
    ],
)
def test_a_bad_field_is_refused_with_the_reason(fields, message):
    good = {"request_id": "r", "token_ids": [1], "sampling": SamplingParams()}
    with pytest.raises(ValueError, match=message):
        check_request(AddRequest(**(good | fields)), READY)


def test_a_good_request_passes():
    sampling = SamplingParams(stop_token_ids=[49], logit_bias={0: 1.0})
    check_request(AddRequest(request_id="r", token_ids=[1], sampling=sampling), READY)


def test_a_text_that_could_never_fit_is_refused_before_it_is_tokenized():
    assert check_text_len("x" * 4_000, 10, 100) == "x" * 4_000
    with pytest.raises(ValueError, match="the text has 4001 characters, and over 4000 never fit"):
        check_text_len("x" * 4_001, 10, 100)
