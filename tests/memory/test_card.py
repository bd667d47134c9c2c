"""A card that is really full: requests are served in smaller parts or end with one error each.

The memory is taken by plain tensors beside a running engine. In the engine's strict mode survivors
say to the token what they say on an empty card, whatever the parts were.
"""

import json

import pytest
import torch

from zipage_lang.runtime.config import EngineConfig
from zipage_lang.runtime.engine import Engine
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.messages import AddRequest
from zipage_lang.runtime.out_of_memory import release_memory
from zipage_lang.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

MIB = 2**20
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,  # a row's logits take 0.3 MB, and twice that in float32
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
LEFT_MIB = [0, 4, 32, 160]


class FullCard:
    """All of the card's free memory but `left_mib`, taken while entered."""

    def __init__(self, left_mib):
        self._left, self._taken = left_mib, []

    def __enter__(self):
        release_memory()
        spare = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(self._left)]
        for size in (1024 * MIB, 64 * MIB, 4 * MIB, MIB, MIB // 2):
            self._take_all(size)
        del spare
        torch.cuda.empty_cache()
        return self

    def _take_all(self, size):
        while True:
            try:
                self._taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                return

    def __exit__(self, *error):
        self._taken.clear()
        release_memory()


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card-model")
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE))

    def make(**options):
        settings = {
            "load_format": "dummy",
            "backend": "cuda",
            "dtype": "bfloat16",
            "num_blocks": 3000,
            "max_running": 64,
            "max_step_tokens": 2048,
            "num_query_slots": 64,
            "swap_space": 0.1,
            **options,
        }
        return Engine(EngineConfig.from_options(model=str(folder), **settings))

    return make


@pytest.fixture(scope="module")
def strict(make_engine):
    return make_engine(deterministic=True)


@pytest.fixture(scope="module")
def fast(make_engine):
    return make_engine()


def requests():
    """Long prompts, many rows, costly sampling, compactions."""
    for index in range(48):
        tokens = [(31 * index + 7 * j + j * j) % 150_000 for j in range(20 + 40 * (index % 16))]
        is_bounded = index % 3 == 0
        yield AddRequest(
            request_id=f"r{index}",
            token_ids=tokens,
            kv=KVParams(mode="fixed", budget=64, interval=32)
            if is_bounded
            else KVParams(mode="off"),
            sampling=SamplingParams(
                max_tokens=140 if is_bounded else 40,
                temperature=0.0 if index % 2 else 0.8,
                top_p=0.9 if index % 4 == 0 else 1.0,
                repetition_penalty=1.2 if index % 8 == 0 else 1.0,
                logprobs=2 if index % 5 == 0 else None,
                prompt_logprobs=1 if index % 12 == 0 else None,
                seed=index,
                ignore_eos=True,
            ),
        )


def run(engine):
    """(tokens, errors) by request; everything must end, and everything come home."""
    tokens, errors, ended = {}, {}, set()
    for request in requests():
        engine.handle(request)
    while engine.has_work:
        for output in engine.step():
            name = output.request_id
            assert name not in ended, f"{name} had ended"
            tokens.setdefault(name, []).extend(output.token_ids)
            if output.is_final:
                ended.add(name)
            if output.error is not None:
                errors[name] = output.error
        engine.scheduler.check_invariants()
    assert ended == {request.request_id for request in requests()}
    engine.scheduler.flush_cache()
    engine.scheduler.check_invariants()
    stats = engine.stats()
    assert stats["num_free"] == stats["num_blocks"]
    assert stats["num_free_query_slots"] == engine.limits.num_query_slots
    assert stats["num_free_host_blocks"] == engine.limits.num_host_blocks
    return tokens, errors


@pytest.mark.parametrize("left_mib", LEFT_MIB)
def test_on_a_full_card_survivors_say_what_they_say_on_an_empty_one(strict, left_mib):
    expected, errors = run(strict)
    assert not errors
    with FullCard(left_mib):
        tokens, errors = run(strict)
    print(
        f"{left_mib} MiB left: {len(errors)} of {len(expected)} failed",
        strict.stats()["num_out_of_memory"],
    )
    for name, told in tokens.items():
        if name in errors:
            assert "out of memory" in errors[name]
            assert told == expected[name][: len(told)]
        else:
            assert told == expected[name], name
    again, errors = run(strict)
    assert not errors
    assert again == expected


@pytest.mark.parametrize("left_mib", LEFT_MIB)
def test_on_a_full_card_everyone_ends_and_the_engine_recovers(fast, left_mib):
    before = fast.stats()["num_out_of_memory"]
    with FullCard(left_mib):
        _, errors = run(fast)
        assert set(map(type, errors.values())) <= {str}
    if left_mib == 0:
        assert fast.stats()["num_out_of_memory"] > before, "the card was not full"
    _, errors = run(fast)
    assert not errors


def test_graphs_that_find_no_memory_while_serving_are_done_without(make_engine, caplog):
    engine = make_engine()
    graphs = engine.runner._graphs
    graphs._captured.clear()
    with FullCard(48):
        _, errors = run(engine)
    assert all("out of memory" in error for error in errors.values())
    _, errors = run(engine)
    assert not errors


def test_a_card_without_room_for_the_engine_is_one_clear_error(make_engine):
    with FullCard(64), pytest.raises(ValueError, match=r"did not fit the card|no memory is left"):
        make_engine()
