"""What a model writes to itself: given starts, ends of texts, and the cache it leaves."""

import torch


@torch.inference_mode()
def write_all(writer):
    """Token ids that went through the model, [num_sequences, max_len]."""
    tokens = []
    for _ in range(writer.max_len):
        tokens.append(writer._tokens)
        writer.write()
    return torch.stack(tokens, dim=1)


def test_texts_start_as_given_and_go_on_by_themselves(world):
    tokens = write_all(world.writer(num_sequences=3, starts=[[3, 7, 8, 9], [4]]))
    assert tokens[0, :4].tolist() == [3, 7, 8, 9]
    assert tokens[1, 0] == 4
    assert tokens[2, :4].tolist() == [3, 7, 8, 9]  # starts are given out in turn
    assert tokens[0].tolist() != tokens[2].tolist()
    assert tokens[:, 4:].unique().numel() > 8


def test_equal_seeds_write_equal_texts(world):
    first, again, other = (write_all(world.writer(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_text_ends_before_its_first_stop_token_behind_its_start(world):
    stops = (5, 6, 7, 8)
    writer = world.writer(num_sequences=8, max_len=60, starts=[[5, 6, 7]], stops=stops)
    tokens = write_all(writer)
    is_stop = torch.isin(tokens, torch.tensor(stops))
    is_stop[:, :3] = False
    assert is_stop.any()
    for line, length in zip(is_stop, writer.lens.tolist(), strict=True):
        found = line.nonzero().flatten().tolist()
        assert length == (found[0] if found else 60) or (not found and length == 60)


@torch.inference_mode()
def test_all_have_ended_only_when_the_last_has(world):
    writer = world.writer(num_sequences=4, max_len=60, stops=tuple(range(8)))
    ended_at = None
    for step in range(60):
        writer.write()
        if writer.all_ended():
            ended_at = step + 1
            break
    assert ended_at == int(writer.lens.max()) + 1


@torch.inference_mode()
def test_the_cache_is_read_in_token_order(world):
    together = world.writer(num_sequences=3, max_len=21)
    tokens = write_all(together)
    for index in range(3):
        alone = world.writer(num_sequences=1, max_len=21, starts=[tokens[index].tolist()])
        write_all(alone)
        for layer in range(world.shape.num_layers):
            assert together.keys(layer).shape == (3, 21, 2, 8)
            assert torch.allclose(together.keys(layer)[index], alone.keys(layer)[0], atol=1e-4)
            assert torch.allclose(together.values(layer)[index], alone.values(layer)[0], atol=1e-4)
            assert torch.allclose(together.ring(layer)[index], alone.ring(layer)[0], atol=1e-4)
