"""Every policy on the Triton kernels keeps what it keeps on their twins."""

import pytest

pytest.importorskip("triton", reason="Triton kernels are tested where triton is installed")

from test_support.one_request import OneRequest, random_calibration

from zipage_lang.kernels import (
    blend,
    compact,
    forecast,
    kv_store,
    ranges,
    scores,
    select,
    tails,
    tiers,
)
from zipage_lang.kernels.reference import scores as reference_scores
from zipage_lang.runtime.policies.registry import load_policies

ASKED = [
    "zipage:num_recent=3",
    "zipage2:num_recent=3",
    "tiers:num_recent=3",
    "rkv:num_recent=3",
    "gkv:num_recent=3:pool_kernel=3",
    "snapkv:num_recent=3",
    "h2o:num_recent=3",
    "streaming",
    "random:num_recent=3",
    "page:page_len=4:num_fresh=3",
    "kvcompress:num_recent=3",
    "pyramidkv:num_recent=3",
    "keydiff:num_recent=3",
    "vase:num_recent=3:num_sinks=1",
    "triattention:num_recent=3",
]


class TritonKernels:
    """As much of the `cuda` backend as a compaction calls."""

    name = "triton"
    copy_blocks = staticmethod(kv_store.copy_blocks)
    gather_keys = staticmethod(reference_scores.gather_keys)
    gather_values = staticmethod(reference_scores.gather_values)
    attention_mass = staticmethod(scores.attention_mass)
    flash_similarity = staticmethod(scores.flash_similarity)
    mass_and_similarity = staticmethod(scores.mass_and_similarity)
    value_range = staticmethod(ranges.value_range)
    forecast_scores = staticmethod(forecast.forecast_scores)
    protect_slots = staticmethod(select.protect_slots)
    select_top_k = staticmethod(select.select_top_k)
    fill_holes = staticmethod(compact.fill_holes)
    expand_tails = staticmethod(tails.expand_tails)
    compact_blend = staticmethod(blend.compact_blend)
    compact_tiers = staticmethod(tiers.compact_tiers)

    def __init__(self, device):
        self.device = device


def kept(request):
    return {head: [token.position for token in tail] for head, tail in request.tails.items()}


@pytest.mark.parametrize("asked", ASKED)
def test_a_policy_keeps_the_same_slots_in_the_same_places(device, asked):
    policy = load_policies()[asked]
    ours, theirs = OneRequest(3, 3, backend=TritonKernels(device)), OneRequest(3, 3)
    for num_new, num_keep in ((37, 25), (9, 21)):
        for request in (ours, theirs):
            request.grow(num_new)
            request.compact(policy, num_keep, random_calibration(request.backend.device))
        assert kept(ours) == kept(theirs)
        for head, tail in ours.tails.items():
            past = [token.history for token in theirs.tails[head]]
            # Where a policy stores nothing, both hold the NaN of unwritten memory.
            assert [t.history for t in tail] == pytest.approx(past, 1e-4, 1e-6, nan_ok=True)


def test_every_shipped_policy_is_here():
    assert {asked.partition(":")[0] for asked in ASKED} == set(load_policies()) - {"full"}
