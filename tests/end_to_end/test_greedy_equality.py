"""Greedy outputs equal transformers', however the engine computes them (issue 2, point 1)."""

import random

import pytest
import transformers

import zipage_lang as zipage
from zipage_lang.runtime import engine_parts

MAX_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Q: If a train travels 60 miles in 1.5 hours, what is its speed?\nA:",
    "List three fruits:\n1.",
    "The theory of relativity states that",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    "12 + 35 =",
    "Bonjour, comment",
    "The quick brown fox",
    '{"name": "Alice", "age":',
    "Water boils at",
    "In 1969, humans first",
    "To bake bread you need",
    "Photosynthesis is the process by which",
    "import numpy as np\n\nx = np.",
    "Roses are red, violets are",
    "The mitochondria is",
    "Once there were two brothers. The older brother said to the younger one: " * 6,
]
VARIANTS = {
    "whole prefill, block size 16": {},
    "chunk 7": {"max_chunk_len": 7, "max_step_tokens": 40},
    "block size 1": {"block_size": 1},
    "block size 2": {"block_size": 2},
    "block size 64": {"block_size": 64},
    "budget above the length": {"kv_mode": "fixed", "kv_budget": 512, "evict_interval": 64},
    "adaptive, memory free": {"kv_mode": "adaptive", "kv_budget": 32, "evict_interval": 16},
    "no prefix caching": {"prefix_caching": False},
    "planned ahead": {"overlap": True},
}


@pytest.fixture(scope="module", autouse=True)
def weights_read_once():
    """Engines of this process share a model's weights, which none of them writes."""
    load, loaded = engine_parts.load_model, {}

    def load_once(path, dtype, backend, max_model_len):
        key = (path, dtype, max_model_len)
        if key not in loaded:
            loaded[key] = load(path, dtype, backend, max_model_len)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_parts, "load_model", load_once)
        yield


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2_reference, tokenizer, prompts, reference):
    return reference(smollm2_reference, prompts, MAX_TOKENS, [tokenizer.eos_token_id])


SMOLLM2_VARIANTS = {
    name: options
    for name, options in VARIANTS.items()
    if name not in ("adaptive, memory free", "no prefix caching", "planned ahead")
}  # what is left out takes time and is run on the tiny models


@pytest.mark.parametrize("options", SMOLLM2_VARIANTS.values(), ids=SMOLLM2_VARIANTS.keys())
def test_smollm2_in_one_batch(smollm2, prompts, expected, driver, options):
    assert driver(smollm2, **options).greedy(prompts, MAX_TOKENS) == expected


def test_smollm2_alone_then_sixteen_on_a_warm_cache(smollm2, prompts, expected, driver):
    engine = driver(smollm2)
    for index in range(len(prompts)):
        engine.add(f"alone-{index}", prompts[index], temperature=0, max_tokens=MAX_TOKENS)
        engine.finish()
        assert engine.tokens(f"alone-{index}") == expected[index]
    cold = engine.greedy(prompts[:16], MAX_TOKENS, name="first")
    warm = engine.greedy(prompts[:16], MAX_TOKENS, name="warm")
    assert cold == warm == expected[:16]
    hits = sum(engine.final(f"warm-{i}").usage.cached_tokens for i in range(16))
    assert hits >= 16 * sum(len(p) > 17 for p in prompts[:16])


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"swap_space": 0}, "num_preemptions"),
        ({"swap_space": 0.1, "turn_len": 8}, "num_turns_taken"),
    ],
    ids=["preempted", "taking turns"],
)
def test_smollm2_without_a_place(smollm2, prompts, expected, driver, options, count):
    """A pool of 40 blocks can't hold 20 requests of up to 9 blocks: some must lose their place."""
    engine = driver(smollm2, num_blocks=40, **options)
    assert engine.greedy(prompts, MAX_TOKENS) == expected
    assert engine.engine.stats()[count] > 0


def test_smollm2_over_zmq(prompts, expected):
    with zipage.Engine("smollm2-135m", kv_cache_memory=0.25, num_threads=1) as engine:
        sampling = zipage.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = engine.generate(prompts, sampling)
    assert [list(output.token_ids) for output in outputs] == expected


TINY = {
    "Qwen3, tied, group 1": ("Qwen3", {"tie_word_embeddings": True}),
    "Qwen3, untied, group 8": (
        "Qwen3",
        {"tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "Qwen3, group 3": ("Qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "Qwen2, tied, group 3": (
        "Qwen2",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "Qwen2, untied, group 8": (
        "Qwen2",
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "hidden_size": 64},
    ),
    "Llama, untied, group 8": ("Llama", {"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=TINY.values(), ids=TINY.keys())
def tiny(request, make_tiny_model, reference):
    family, options = request.param
    folder, model = make_tiny_model(family, **options)
    rng = random.Random(7)
    prompts = [[rng.randrange(199) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    return folder, prompts, reference(model, prompts, MAX_TOKENS, [])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_tiny_models_in_one_batch(tiny, driver, options):
    folder, prompts, expected = tiny
    assert driver(folder, **options).greedy(prompts, MAX_TOKENS) == expected


@pytest.mark.parametrize(
    ("swap_space", "count"), [(0, "num_preemptions"), (0.01, "num_swap_ins")], ids=["again", "swap"]
)
def test_tiny_models_alone_warm_and_without_a_place(tiny, driver, swap_space, count):
    folder, prompts, expected = tiny
    engine = driver(folder, num_blocks=24, swap_space=swap_space)
    for index, prompt in enumerate(prompts):
        engine.add(f"alone-{index}", prompt, temperature=0, max_tokens=MAX_TOKENS)
        engine.finish()
        assert engine.tokens(f"alone-{index}") == expected[index]
    assert engine.greedy(prompts, MAX_TOKENS) == expected
    assert engine.engine.stats()[count] > 0
