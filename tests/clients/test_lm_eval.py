"""lm-eval-harness's `local-completions`, unmodified: its likelihoods are transformers' own.

Knows nothing of how the server computes them.
"""

from pathlib import Path

import pytest
import torch
import yaml

TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 2e-3  # nats per continuation; both sides compute in float32, in different orders


@pytest.fixture(scope="module")
def harness(access, tmp_path_factory):
    """lm-eval's model of the server. Its data sets' cache and the key are for these tests alone."""
    pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", access.key)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield LocalCompletionsAPI(
            base_url=f"{access.url}/completions",
            model=access.model,
            auth_token=access.key,
            batch_size=3,
            max_length=512,
            num_concurrent=2,
        )


@pytest.fixture(scope="module")
def likelihood(smollm2, smollm2_reference):
    """transformers' log-likelihood of a continuation, and whether each token is the likeliest."""
    from zipage_lang.frontend.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(smollm2))

    @torch.no_grad()
    def compute(context, continuation):
        ids = tokenizer.encode(context + continuation, False)
        first = len(tokenizer.encode(context, False)) if context else 1
        logits = smollm2_reference(torch.tensor([ids])).logits[0, first - 1 : -1]
        logprobs = logits.log_softmax(-1)
        wanted = torch.tensor(ids[first:])
        total = logprobs.gather(1, wanted[:, None]).sum().item()
        return total, bool((logprobs.argmax(-1) == wanted).all())

    return compute


def test_it_finds_the_servers_own_tokenizer(harness):
    assert harness.tokenizer_backend == "remote"
    text = "Ein Käfig 🐤 狗"
    assert harness.tokenizer.decode(harness.tokenizer.encode(text)) == text


def test_likelihoods_of_a_task_are_those_of_a_direct_computation(harness, likelihood):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    task = yaml.safe_load((TASKS / "animals.yaml").read_text())
    task["dataset_kwargs"] = {"data_files": {"test": str(TASKS / "animals.jsonl")}}
    results = simple_evaluate(
        model=harness,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    samples = results["samples"]["animals"]
    assert len(samples) == 4
    correct = 0
    for sample in samples:
        expected = [likelihood(*pair) for pair in sample["arguments"]]
        told = [response[0] for response in sample["resps"]]
        assert [total for total, _ in told] == pytest.approx(
            [total for total, _ in expected], abs=TOLERANCE
        )
        assert [is_greedy for _, is_greedy in told] == [is_greedy for _, is_greedy in expected]
        best = max(range(3), key=lambda place: expected[place][0])
        correct += best == sample["target"]
    assert results["results"]["animals"]["acc,none"] == correct / 4


def test_greedy_continuations_are_said_to_be_greedy(harness, likelihood):
    from lm_eval.api.instance import Instance

    context = "The capital of France is"
    (text,) = harness.generate_until(
        [Instance("generate_until", {}, (context, {"max_gen_toks": 3, "until": ["\n"]}), 0)]
    )
    pairs = [(context, text), (context, " a zebra")]
    told = harness.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert [is_greedy for _, is_greedy in told] == [True, False]
    expected = [likelihood(*pair) for pair in pairs]
    assert expected[0][1]
    assert [total for total, _ in told] == pytest.approx(
        [total for total, _ in expected], abs=TOLERANCE
    )


def test_a_whole_text_has_a_likelihood(harness, likelihood):
    """The harness puts the token before the first one that begins texts."""
    from lm_eval.api.instance import Instance

    text = "Bees make honey, and bears eat it."
    (told,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    total, _ = likelihood(harness.tokenizer.bos_token, text)
    assert told == pytest.approx(total, abs=TOLERANCE)
