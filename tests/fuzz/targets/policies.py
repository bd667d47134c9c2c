"""The notation of KV policies: any text is refused with a reason, or makes a policy.

Knows nothing of tensors.
"""

from test_support.fuzz_input import Choices

from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.registry import PolicyQueries, load_policies

POLICIES = load_policies()
QUERIES = PolicyQueries(POLICIES, 16, lambda _: None)
NAMES = tuple(POLICIES)
PARAMETERS = ("num_recent", "num_sinks", "num_queries", "mass_weight", "lot_share", "alpha", "seed")
VALUES = ("0", "-1", "1", "16", "1e3", "nan", "inf", "1_0", "0x10", "true", "False", "9" * 5000, "")


def target(data: bytes) -> None:
    choices = Choices(data)
    asked = choices.rest().decode("utf-8", "ignore") if choices.flag() else notation(choices)
    if asked:
        assert KVParams(policy=asked).policy == asked
    try:
        policy = POLICIES[asked]
    except (KeyError, ValueError) as error:
        assert str(error)
        return
    assert isinstance(policy, Policy)
    assert policy.name in NAMES
    assert POLICIES[asked] is policy
    try:
        assert 0 <= QUERIES[asked] <= 16
    except ValueError as error:
        assert "num_queries" in str(error)


def notation(choices: Choices) -> str:
    name = choices.pick((*NAMES, "nothing", ""))
    known = tuple(getattr(type(POLICIES.get(name, 0)), "__dataclass_fields__", PARAMETERS))
    pairs = []
    for _ in range(choices.below(4)):
        key = choices.pick((*known, *PARAMETERS))
        value = choices.text(6) if choices.flag() else choices.pick(VALUES)
        pairs.append(f"{key}{choices.pick(('=', '=', '==', ':', ''))}{value}")
    return ":".join([name, *pairs])
