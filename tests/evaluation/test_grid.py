"""What a sweep varies. Knows nothing of engines."""

import pytest

from zipage_lang.evaluation.grid import FULL, Amount, Grid, parse_amounts


def grid(**changes):
    values = {
        "policies": ("zipage", "random"),
        "budgets": parse_amounts("64,25%"),
        "intervals": parse_amounts("32"),
    }
    return Grid(**{**values, **changes})


def test_shares_are_of_the_mean_full_length():
    budgets = {setting.budget for setting in grid().settings(1000.0)}
    assert budgets == {64, 250}
    assert {s.asked_budget for s in grid().settings(1000.0)} == {"64", "25%"}


def test_a_share_is_at_least_one_token():
    assert Amount.parse("1%").resolve(10.0) == 1


def test_every_combination_is_there_once():
    names = [s.name for s in grid(modes=("fixed", "adaptive")).settings(256.0)]
    assert len(names) == len(set(names)) == 4  # 25% of 256 is 64 again


def test_full_kv_asks_for_no_compaction():
    assert FULL.kv().mode == "off"
    assert FULL.name == "off"


def test_a_setting_becomes_the_requests_own_kv_params():
    kv = grid(protects=("none",)).settings(1000.0)[0].kv()
    assert (kv.mode, kv.policy, kv.budget, kv.interval) == ("fixed", "zipage", 64, 32)
    assert kv.protect == "none"


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "12.5", "%", "0%", "nan%", "inf%"])
def test_what_is_no_amount_is_refused_in_one_sentence(text):
    with pytest.raises(ValueError, match="is no amount: give tokens such as 128"):
        Amount.parse(text)


def test_a_policy_with_parameters_is_asked_for_as_it_stands():
    setting = grid(policies=("rkv:mass_weight=0.5:pool_kernel=7",)).settings(1000.0)[0]
    assert setting.kv().policy == "rkv:mass_weight=0.5:pool_kernel=7"
    assert setting.name == "rkv_mass_weight=0.5_pool_kernel=7-k64-e32-fixed-prompt"


def test_policies_without_budgets_are_refused():
    with pytest.raises(ValueError, match="give --budget"):
        grid(budgets=())
