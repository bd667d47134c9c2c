"""Policies by name, shipped and third-party; a third-party one runs through the compressor."""

import textwrap

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.kv_cache import KVCache, KVShape
from zipage_lang.runtime.kv_compressor import KVCompressor
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.registry import load_policies
from zipage_lang.runtime.policies.zipage import Zipage
from zipage_lang.runtime.step_plan import Compaction

LONG_KEYS = """
    import dataclasses

    from zipage_lang.runtime.policies.policy import Scores, TailView


    @dataclasses.dataclass(frozen=True)
    class LongKeys:
        name: str = "long-keys"
        num_queries: int = 0
        num_recent: int = 2
        num_sinks: int = 1

        def score(self, view: TailView) -> Scores:
            return Scores(keep=view.keys().norm(dim=-1))


    long_keys = LongKeys()
    not_a_policy = 7


    def make():
        return LongKeys(name="made")


    @dataclasses.dataclass(frozen=True)
    class Impostor(LongKeys):
        name: str = "zipage"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts the module above on the path, with one entry point, as pip would."""

    def install_entry_point(target, module="long_keys_policy"):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(LONG_KEYS))
        info = tmp_path / "long_keys-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: long-keys\nVersion: 1.0\n")
        entry = f"[zipage_lang.policies]\nlong-keys = {module}:{target}\n"
        (info / "entry_points.txt").write_text(entry)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install_entry_point


def test_shipped_policies_are_there_by_name():
    policies = load_policies()
    assert {"full", "zipage", "streaming", "random"} <= set(policies)
    assert all(isinstance(policy, Policy) for policy in policies.values())
    assert all(policy.name == name for name, policy in policies.items())


@pytest.mark.parametrize(
    ("target", "name"), [("LongKeys", "long-keys"), ("long_keys", "long-keys"), ("make", "made")]
)
def test_entry_point_may_be_a_class_an_instance_or_a_maker(install, target, name):
    install(target)
    assert load_policies()[name].name == name


def test_entry_point_that_is_no_policy_is_refused(install):
    install("not_a_policy")
    with pytest.raises(ValueError, match=r"long_keys_policy:not_a_policy.* is no policy"):
        load_policies()


def test_entry_point_may_not_take_a_shipped_name(install):
    install("Impostor")
    with pytest.raises(ValueError, match=r"'zipage' .* is already taken by Zipage"):
        load_policies()


def test_third_party_policy_compacts(install):
    install("LongKeys")
    shape = KVShape(num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=2, dtype=torch.float32)
    cache = KVCache(
        shape,
        num_blocks=4,
        block_size=4,
        num_query_slots=1,
        window=16,
        device=torch.device("cpu"),
    )
    norms = [1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 0.1, 0.2]  # slot 0 is a sink, slots 6 and 7 are recent
    cache.kv[0, [1] * 4 + [2] * 4, 0, [0, 1, 2, 3] * 2, 0, 0] = torch.tensor(norms)
    item = Compaction(
        ident=0,
        row=0,
        policy="long-keys",
        protected_len=0,
        tail_len=8,
        num_keep=5,
        stateful_len=0,
        logical_len=8,
        query_slot=None,
        num_queries=0,
        seed=0,
        block_ids_before=(1, 2),
        block_ids=(1, 2),
        block_copies=(),
    )
    KVCompressor(cache, choose_backend("cpu"), load_policies()).run((item,))
    kept = cache.position[0, [1, 1, 1, 1, 2], [0, 1, 2, 3, 0], 0].tolist()
    assert kept == [0, 1, 6, 3, 7]


@pytest.mark.parametrize(
    ("field", "value"), [("redundancy", "exact"), ("pool_kernel", 4), ("mass_weight", 1.5)]
)
def test_zipage_refuses_settings_that_make_no_sense(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*{value}"):
        Zipage(**{field: value})
