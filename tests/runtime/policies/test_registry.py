"""Policies by name, shipped and third-party; a third-party one runs through the compressor."""

import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from test_support.one_request import OneRequest

from zipage_lang.runtime.calibrations import Calibrations, MeasuredOnce
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.registry import SHIPPED, PolicyQueries, load_policies
from zipage_lang.runtime.policies.zipage import Zipage

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "policies.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]  # a policy in one file
ENTRY = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
MORE = """
long_values = LongValues()
not_a_policy = 7


def make():
    return LongValues(name="made")


def misnamed():
    return LongValues(name="a:b")


@dataclasses.dataclass(frozen=True)
class Impostor(LongValues):
    name: str = "zipage"
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts the page's example on the path, with its entry point, as pip would."""

    def install_entry_point(target="LongValues"):
        (tmp_path / "long_values.py").write_text(EXAMPLE + MORE)
        info = tmp_path / "long_values-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: long-values\nVersion: 1.0\n")
        groups = tomllib.loads(ENTRY)["project"]["entry-points"]
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]
        text = "\n".join(lines).replace(":LongValues", f":{target}")
        (info / "entry_points.txt").write_text(text + "\n")
        monkeypatch.delitem(sys.modules, "long_values", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install_entry_point


def test_shipped_policies_are_there_by_name():
    policies = load_policies()
    assert {"full", "zipage", "streaming", "random"} <= set(policies)
    assert all(isinstance(policy, Policy) for policy in policies.values())
    assert all(policy.name == name for name, policy in policies.items())


@pytest.mark.parametrize(
    ("target", "name"),
    [("LongValues", "long-values"), ("long_values", "long-values"), ("make", "made")],
)
def test_entry_point_may_be_a_class_an_instance_or_a_maker(install, target, name):
    install(target)
    assert load_policies()[name].name == name


def test_entry_point_that_is_no_policy_is_refused(install):
    install("not_a_policy")
    with pytest.raises(ValueError, match=r"long_values:not_a_policy.* is no policy"):
        load_policies()


def test_entry_point_may_not_take_a_shipped_name(install):
    install("Impostor")
    with pytest.raises(ValueError, match=r"'zipage' .* is already taken by Zipage"):
        load_policies()


def test_entry_point_with_a_name_that_reads_as_parameters_is_refused(install):
    install("misnamed")
    with pytest.raises(ValueError, match=r"'a:b' .* needs a name without"):
        load_policies()


def test_the_example_of_the_page_is_one_short_file():
    assert len(EXAMPLE.splitlines()) < 60


@pytest.mark.parametrize("asked", ["long-values", "long-values:power=2.5:num_recent=2"])
def test_the_example_of_the_page_compacts(install, asked):
    install()
    policy = load_policies()[asked]
    request = OneRequest(1, protected_len=3)
    for _ in range(2):
        request.grow(30)
        before = {head: list(tail) for head, tail in request.tails.items()}
        request.compact(policy, 20)
        for head, tail in request.tails.items():
            assert {t.position for t in tail} == longest_values(policy, before[head])


def longest_values(policy, tail):
    """The newest, the oldest, and of the others those with the longest values: 20 in all."""
    at = sorted(token.position for token in tail)
    kept = set(at[-policy.num_recent :]) | set(at[: policy.num_sinks])
    rest = [token for token in tail if token.position not in kept]
    rest.sort(key=lambda token: float(np.linalg.norm(token.value)), reverse=True)
    return kept | {token.position for token in rest[: 20 - len(kept)]}


def test_the_page_names_every_policy_and_its_true_defaults():
    policies, named = load_policies(), set()
    for line in re.findall(r"^\| `(\w+)` \|(.*)$", PAGE, re.MULTILINE):
        name, rest = line
        if name in policies:
            named.add(name)
            for key, value in re.findall(r"`(\w+)=([\w.]+)`", rest.replace('mode="off"', "")):
                assert str(getattr(policies[name], key)).lower() == value, (name, key)
    assert named == set(policies)
    for name, num_parameters in (("zipage2", 3), ("tiers", 3)):
        section = PAGE.partition(f"## {name}\n")[2].partition("\n## ")[0]
        parameters = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.MULTILINE)
        assert len(parameters) == num_parameters
        assert all(getattr(policies[name], key) == float(value) for key, value in parameters)


@pytest.mark.parametrize("make", SHIPPED[1:])
def test_a_shipped_policy_says_what_it_reads(make):
    assert "Reads" in make.__doc__


def test_parameters_are_read_as_what_their_defaults_are():
    policies = load_policies()
    asked = policies["zipage:mass_weight=1:num_recent=3:redundancy=flash"]
    assert asked == Zipage(mass_weight=1.0, num_recent=3, redundancy="flash")
    assert isinstance(asked.mass_weight, float)
    assert policies["random:fresh=False"] == Random(fresh=False)
    assert policies["zipage:mass_weight=1:num_recent=3:redundancy=flash"] is asked


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("rkv:", "'' sets nothing; write parameters as name:parameter=value"),
        ("rkv:fast", "'fast' sets nothing"),
        ("rkv:mass_wait=1", "no parameter 'mass_wait'; did you mean 'mass_weight'\\?"),
        ("rkv:name=zipage", "no parameter 'name'"),
        ("full:num_recent=1", "no parameter 'num_recent'; known: none"),
        ("rkv:mass_weight=0.1:mass_weight=0.2", "sets mass_weight twice"),
        ("rkv:mass_weight=much", "mass_weight='much' must be of kind float"),
        ("rkv:mass_weight=nan", "mass_weight='nan' must be of kind float"),
        ("rkv:num_recent=1.5", "num_recent='1.5' must be of kind int"),
        ("random:fresh=1", "fresh='1' must be of kind true or false"),
        ("rkv:mass_weight=1.5", "mass_weight=1.5 must lie between 0 and 1"),
        ("snapkv:pool_kernel=4", "pool_kernel=4 must be odd"),
        ("rkv:num_recent=-1", "num_recent=-1 must lie between 0 and"),
        ("streaming:num_sinks=100000", "num_sinks=100000 must lie between 0 and 64"),
        ("rkv:num_queries=0", "num_queries=0 must be at least 1"),
        ("random:num_queries=4", "num_queries=4 must be 0"),
        ("tiers:mass_share=0.9", "may not be more than 1 together, not 1.55"),
        ("zipage:redundancy=none", "redundancy='none' must be lightning or flash"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(asked, complaint):
    with pytest.raises(ValueError, match=f"^kv policy {asked!r}.*{complaint}"):
        load_policies()[asked]


def test_an_unknown_policy_is_no_key():
    policies = load_policies()
    assert "rkv:mass_weight=0.5" in policies
    assert "rvk" not in policies
    assert "rvk:mass_weight=0.5" not in policies
    assert list(policies) == [name for name in policies if ":" not in name]


def test_remade_policies_are_equal_however_many_are_asked_for():
    policies = load_policies()
    asked = [f"rkv:mass_weight=0.{number:03}" for number in range(600)]
    first = [policies[text] for text in asked]
    assert [policies[text] for text in asked] == first


def test_more_queries_than_the_rings_hold_are_refused():
    queries = PolicyQueries(load_policies(), 16, lambda _: None)
    assert queries["snapkv:num_queries=9"] == 9
    with pytest.raises(ValueError, match="scores with 17 queries but this engine keeps 16"):
        queries["snapkv:num_queries=17"]


def test_what_a_policy_needs_of_the_model_is_measured_once_and_before_it_is_answered_for():
    calls = []
    calibrations = Calibrations(
        MeasuredOnce(lambda: calls.append("stats") or "statistics"),
        MeasuredOnce(lambda: calls.append("forecast") or "weights"),
    )
    policies = load_policies()
    queries = PolicyQueries(policies, 16, calibrations.prepare)
    assert queries["rkv"] == 8
    assert not calls
    assert calibrations.of(policies["rkv"]) == (None, None)
    for _ in range(2):
        assert queries["triattention:num_recent=9"] == 0
    assert calls == ["stats"]
    assert calibrations.of(policies["triattention"]) == ("statistics", None)
    assert queries["zipage2"] == 0
    assert calls == ["stats", "forecast"]
    assert calibrations.of(policies["zipage2:recent_share=0.3"]) == (None, "weights")


def test_a_calibration_that_finds_no_memory_is_an_error_of_the_request_and_may_succeed_later():
    outcomes = [torch.OutOfMemoryError("2 GiB"), "weights"]

    def measure():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    calibrations = Calibrations(MeasuredOnce(lambda: "statistics"), MeasuredOnce(measure))
    queries = PolicyQueries(load_policies(), 16, calibrations.prepare)
    with pytest.raises(ValueError, match="zipage calibrate"):
        queries["zipage2"]
    assert queries["zipage2"] == 0


def test_a_calibration_that_was_never_prepared_is_not_given_out():
    calibrations = Calibrations(MeasuredOnce(lambda: "statistics"), MeasuredOnce(lambda: "weights"))
    with pytest.raises(AssertionError, match="was not prepared for"):
        calibrations.of(load_policies()["zipage2"])


@pytest.mark.parametrize(
    ("field", "value"), [("redundancy", "exact"), ("pool_kernel", 4), ("mass_weight", 1.5)]
)
def test_zipage_refuses_settings_that_make_no_sense(field, value):
    with pytest.raises(ValueError, match=f"{field}=.*{value}"):
        Zipage(**{field: value})
