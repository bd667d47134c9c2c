"""A config with any value in any place is read, or refused with a ValueError; no other error.

Knows nothing of weights.
"""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zipage_lang.runtime.models.llama import LLAMA
from zipage_lang.runtime.models.qwen2 import QWEN2
from zipage_lang.runtime.models.qwen3 import QWEN3
from zipage_lang.runtime.models.rope import rotary_frequencies

GOOD = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "layer_types": ["full_attention"],
    "eos_token_id": [2],
    "bos_token_id": 1,
}
SCALINGS = (
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
    },
    {"rope_type": "divisors", "divisors": [1.0, 2.0]},
)
ODD_NUMBERS = (0, 1, -1, 0.5, 2**63, 10**400, 1e-320, 1e308, math.nan, math.inf, True)
odd = st.sampled_from(ODD_NUMBERS) | st.none() | st.text(max_size=3) | st.lists(st.integers())


def read_or_refused(family, config):
    try:
        arch = family.read_config(config)
        angles, amplitude = rotary_frequencies(arch, 64)
    except ValueError as error:
        assert str(error)  # noqa: PT017 - odd values may be good ones
        return
    assert torch.isfinite(angles).all()
    assert math.isfinite(amplitude)
    assert all(isinstance(token_id, int) for token_id in arch.eos_token_ids)


@given(st.sampled_from([LLAMA, QWEN2, QWEN3]), st.sampled_from(sorted(GOOD)), odd)
def test_any_value_of_a_field_is_read_or_refused(family, name, value):
    read_or_refused(family, GOOD | {name: value})


@given(st.sampled_from(SCALINGS), st.data())
def test_any_value_of_a_rope_setting_is_read_or_refused(scaling, data):
    changed = scaling | {data.draw(st.sampled_from(sorted(scaling))): data.draw(odd)}
    read_or_refused(QWEN3, GOOD | {"rope_scaling": changed})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_attention_heads": "2"}, "num_attention_heads='2'"),
        ({"rope_theta": 1}, "rope_theta=1"),
        ({"rope_scaling": [2]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "lacks the setting 'factor'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0]}}, "1 rope divisors for 2"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"eos_token_id": ["2"]}, "token id"),
        ({"eos_token_id": -1}, "token id"),
        ({"vocab_size": 2**40}, "at most"),
    ],
)
def test_what_can_not_be_computed_with_is_named(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        rotary_frequencies(QWEN3.read_config(GOOD | changes), 64)
