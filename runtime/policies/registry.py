"""Every policy by name: the shipped ones, and those that installed packages add.

Knows nothing of what a policy does.
"""

from importlib.metadata import EntryPoint, entry_points

from zipage_lang.runtime.policies.full import Full
from zipage_lang.runtime.policies.policy import Policy
from zipage_lang.runtime.policies.random import Random
from zipage_lang.runtime.policies.streaming import Streaming
from zipage_lang.runtime.policies.zipage import Zipage

ENTRY_POINT_GROUP = "zipage_lang.policies"


def load_policies() -> dict[str, Policy]:
    """Policy name -> policy: shipped ones, then those of the entry point group.

    An entry point names a policy, or a class or function that makes one without arguments.
    Raises ValueError when it is no policy or takes a name that is already used.
    """
    policies: dict[str, Policy] = {
        policy.name: policy for policy in (Full(), Zipage(), Streaming(), Random())
    }
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        policy = _load(entry)
        if policy.name in policies:
            raise ValueError(
                f"policy {policy.name!r} of entry point {entry.value!r} is already taken by "
                f"{type(policies[policy.name]).__name__}; give it another name"
            )
        policies[policy.name] = policy
    return policies


def _load(entry: EntryPoint) -> Policy:
    found = entry.load()
    is_instance = isinstance(found, Policy) and not isinstance(found, type)
    policy = found if is_instance or not callable(found) else found()
    if not isinstance(policy, Policy):
        raise ValueError(
            f"entry point {entry.name} = {entry.value!r} of group {ENTRY_POINT_GROUP} is no "
            "policy: it needs name, num_queries, num_recent, num_sinks and score(view)"
        )
    return policy
