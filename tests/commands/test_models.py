"""`zipage models`: what is here, what a model is, and the memory it takes."""

import pytest

from zipage_lang.commands.model_facts import facts_of
from zipage_lang.commands.units import binary, decimal


def test_list_tells_how_to_get_what_is_not_here(zipage, monkeypatch, tmp_path):
    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    result = zipage("models", "list")
    assert result.exit_code == 0
    assert "run: zipage models pull smollm2-135m" in result.stdout
    assert "zipage-tiny-reasoner" in result.stdout


def test_info_of_the_bundled_model(zipage):
    lines = dict(
        line.split(maxsplit=1)
        for line in zipage("models", "info", "zipage-tiny-reasoner").stdout.splitlines()
    )
    assert lines["architecture"] == "qwen3"
    assert lines["parameters"].startswith("13.8 M; files 26")
    assert lines["context"] == "4,096 tokens"
    assert "KV 8 KiB a token" in lines["in"]  # float32, the last of the two


def test_info_of_a_published_shape_needs_no_weights():
    facts = facts_of("Qwen/Qwen3-8B")
    assert decimal(facts.num_parameters) == "8.19 G"
    told = dict(facts.lines())
    assert told["path"].startswith("no weights")
    # 2 tensors x 36 layers x 8 heads x 128 x 2 bytes
    assert "KV 144 KiB a token" in told["in bfloat16"]
    assert "chat template" not in told


def test_parameters_are_those_of_the_file(smollm2):
    from zipage_lang.runtime.models.gguf_file import GgufFile

    counted = 0
    for tensor in GgufFile(smollm2).tensors.values():
        size = 1
        for axis in tensor.shape:
            size *= axis
        counted += size
    assert facts_of("smollm2-135m").num_parameters == counted


def test_a_hub_model_with_a_template_says_what_it_can(tmp_path, reasoner):
    for file in reasoner.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ tools }} <think>"}')
    assert dict(facts_of(str(tmp_path)).lines())["chat template"] == "yes, with thinking and tools"
    (tmp_path / "tokenizer_config.json").unlink()
    assert dict(facts_of(str(tmp_path)).lines())["chat template"].startswith("none")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (98_362_432, "93.8 MiB"), (2**30, "1 GiB"), (2**50, "1024 TiB")],
)
def test_bytes_are_told_in_binary_units(num_bytes, text):
    assert binary(num_bytes) == text
