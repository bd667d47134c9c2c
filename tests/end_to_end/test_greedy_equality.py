"""Greedy outputs equal transformers', however the engine computes them (issue 2, point 1)."""

import random

import pytest

import zipage_lang as zipage
from zipage_lang.frontend.tokenizer import load_tokenizer
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
    return load_tokenizer(str(smollm2))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def first_batch(smollm2, prompts, driver):
    """(engine, what it says to all prompts in one batch)."""
    engine = driver(smollm2)
    return engine, engine.greedy(prompts, MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(first_batch, smollm2_reference, tokenizer, prompts, confirmed):
    """transformers' own: it only needs one pass a prompt where the engine has guessed right."""
    _, guesses = first_batch
    return [
        confirmed(smollm2_reference, prompt, guess, MAX_TOKENS, tokenizer.eos_token_ids)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


# Two at once, as each takes seconds; block size 64 goes over ZMQ, block size 1 and chunk 7 together
# with preemption. What is left out is run on the tiny models, and each by itself if asked for.
BUDGET_IN_SMALL_BLOCKS = VARIANTS["budget above the length"] | VARIANTS["block size 2"]
APART = [name for name, options in VARIANTS.items() if options]


def test_smollm2_in_one_batch(first_batch, expected):
    assert first_batch[1] == expected


@pytest.mark.parametrize(
    "options",
    [
        BUDGET_IN_SMALL_BLOCKS,
        *[pytest.param(VARIANTS[name], marks=pytest.mark.slow) for name in APART],
    ],
    ids=["budget above the length, block size 2", *APART],
)
def test_smollm2_however_it_is_set(smollm2, prompts, expected, driver, options):
    assert driver(smollm2, **options).greedy(prompts, MAX_TOKENS) == expected


def test_smollm2_sixteen_on_a_warm_cache(first_batch, prompts, expected):
    engine, _ = first_batch
    assert engine.greedy(prompts[:16], MAX_TOKENS, name="warm") == expected[:16]
    hits = sum(engine.final(f"warm-{i}").usage.cached_tokens for i in range(16))
    assert hits >= 16 * sum(len(p) > 17 for p in prompts[:16]) > 0


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([0, 8, 12, 19], id="short, longest, and some that end early"),
        pytest.param(range(len(PROMPTS)), id="all", marks=pytest.mark.slow),
    ],
)
def test_smollm2_alone(smollm2, prompts, expected, driver, places):
    engine = driver(smollm2)
    for place in places:
        assert engine.greedy([prompts[place]], MAX_TOKENS, f"{place}") == [expected[place]]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (
            {"swap_space": 0, **VARIANTS["chunk 7"], **VARIANTS["block size 1"]},
            "num_preemptions",
        ),
        pytest.param({"swap_space": 0}, "num_preemptions", marks=pytest.mark.slow),
        pytest.param({"swap_space": 0.1, "turn_len": 8}, "num_turns_taken", marks=pytest.mark.slow),
    ],
    ids=["preempted, chunk 7, block size 1", "preempted", "taking turns"],
)
def test_smollm2_without_a_place(smollm2, prompts, expected, driver, options, count):
    """A pool of 640 tokens can't hold 20 requests of up to 155: some must lose their place."""
    num_blocks = 640 // options.get("block_size", 16)
    engine = driver(smollm2, num_blocks=num_blocks, **options)
    assert engine.greedy(prompts, MAX_TOKENS) == expected
    assert engine.engine.stats()[count] > 0


def test_smollm2_over_zmq(prompts, expected):
    options = {"kv_cache_memory": 0.25, "num_threads": 1, **VARIANTS["block size 64"]}
    with zipage.Engine("smollm2-135m", **options) as engine:
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


def test_tiny_models_alone_then_on_a_warm_cache(tiny, driver):
    folder, prompts, expected = tiny
    engine = driver(folder)
    for index, prompt in enumerate(prompts):
        assert engine.greedy([prompt], MAX_TOKENS, f"alone-{index}") == [expected[index]]
    assert engine.greedy(prompts, MAX_TOKENS) == expected


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"swap_space": 0}, "num_preemptions"),
        ({"swap_space": 0.01}, "num_swap_ins"),
        ({"swap_space": 0.01, "turn_len": 8}, "num_turns_taken"),
    ],
    ids=["again", "swap", "turns"],
)
def test_tiny_models_without_a_place(tiny, driver, options, count):
    folder, prompts, expected = tiny
    engine = driver(folder, num_blocks=24, **options)
    assert engine.greedy(prompts, MAX_TOKENS) == expected
    assert engine.engine.stats()[count] > 0
