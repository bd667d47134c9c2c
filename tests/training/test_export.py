"""An exported model gives transformers' logits and runs in our engine."""

import json

import pytest
import torch
from export import export_model
from tokenizer import BOS_ID, encode_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import zipage_lang as zipage

PROMPT = "back abcd\n"


@pytest.fixture
def folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr("export.MAX_SHARD_BYTES", 20_000)  # so that there are several
    export_model(model, tmp_path / "model")
    return tmp_path / "model"


def test_transformers_gives_the_logits_that_were_trained(model, folder):
    assert len(list(folder.glob("*.safetensors"))) > 2
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    assert ids == [BOS_ID, *encode_text(PROMPT)]
    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        ours = model.logits(model(torch.tensor(ids), starts))
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_a_second_export_leaves_no_shard_of_the_first(model, folder, monkeypatch):
    monkeypatch.setattr("export.MAX_SHARD_BYTES", 10**9)
    export_model(model, folder)
    (shard,) = folder.glob("*.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name}


def test_our_engine_writes_what_transformers_writes(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[BOS_ID, *encode_text(PROMPT)]])
    expected = theirs.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :]
    sampling = zipage.SamplingParams(temperature=0, max_tokens=40)
    with zipage.Engine(str(folder), num_blocks=64, num_threads=1, dtype="float32") as engine:
        (output,) = engine.generate([PROMPT], sampling)
    assert list(output.token_ids) == expected.tolist()
