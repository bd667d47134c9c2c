"""Keys find their tenants and nothing else does; names and salts of two tenants never meet."""

import hmac
import secrets
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipage_lang.server.api_error import ApiError
from zipage_lang.server.config import ServerConfig
from zipage_lang.server.keys import Keys, read_keys
from zipage_lang.server.tenants import Tenants, operator_only

CLIENTS = ("key-of-anna", "key-of-bert", "clé-voilà")
TEXTS = st.text(max_size=12)


def names_of(tenants):
    return [tenants.find(key.encode()).name for key in CLIENTS]


def test_a_key_finds_its_tenant_and_no_part_of_it_does():
    tenants = Tenants(Keys(CLIENTS))
    assert len(set(names_of(tenants))) == len(CLIENTS)
    for key in CLIENTS:
        apart = unicodedata.normalize("NFD", key)
        near = {key[:-1], key[1:], key + "0", key.upper(), f" {key}", key[::-1], apart} - {key}
        assert not [other for other in near if tenants.find(other.encode())]
    assert tenants.find(b"") is None
    assert tenants.anybody is None


def test_thousands_of_wrong_keys_find_nobody():
    tenants = Tenants(Keys(CLIENTS, "the-operator"))
    assert not [key for _ in range(5000) if tenants.find(key := secrets.token_bytes(8))]


@pytest.mark.parametrize("sent", [*CLIENTS, "wrong", "", "key-of-ann"])
def test_every_key_is_compared_whole_whichever_is_sent(monkeypatch, sent):
    """By count, not by clock: as many comparisons, of as many bytes, for a right key or a wrong."""
    compared, compare = [], hmac.compare_digest

    def counted(left, right):
        compared.append((len(left), len(right)))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    Tenants(Keys(CLIENTS)).find(sent.encode())
    assert compared == [(32, 32)] * len(CLIENTS)


def test_a_tenants_name_tells_nothing_of_its_key():
    """Two processes give one key two names, so no table of keys' hashes is of any use."""
    first, second = Tenants(Keys(CLIENTS)), Tenants(Keys(CLIENTS))
    assert not set(names_of(first)) & set(names_of(second))
    assert all(name.isalnum() and len(name) == 16 for name in names_of(first))


@given(names=st.tuples(TEXTS, TEXTS), salts=st.tuples(TEXTS, TEXTS))
@settings(max_examples=200)
def test_names_and_salts_of_two_tenants_never_meet(names, salts):
    tenants = Tenants(Keys(CLIENTS))
    one, other = (tenants.find(key.encode()) for key in CLIENTS[:2])
    assert one.engine_id(names[0]) != other.engine_id(names[1])
    assert one.namespace(salts[0]) != other.namespace(salts[1])
    assert (one.engine_id(names[0]) == one.engine_id(names[1])) == (names[0] == names[1])
    assert (one.namespace(salts[0]) == one.namespace(salts[1])) == (salts[0] == salts[1])
    assert one.own_words(f"{one.engine_id(names[0])!r} is in use") == f"{names[0]!r} is in use"


def test_without_keys_there_is_one_tenant_whose_names_are_its_own():
    everybody = Tenants(Keys()).anybody
    fields = everybody.engine_fields(namespace="", group_id="g", parent_id="p")
    assert fields == {"tenant": "", "namespace": "", "group_id": "g", "parent_id": "p"}
    assert everybody.engine_id("r") == "r"
    assert everybody.is_operator
    everybody.check_priority(-5)


def test_shared_prefixes_are_shared_by_all_but_salts_still_part_them():
    tenants = Tenants(Keys(CLIENTS), share_prefixes=True)
    one, other = (tenants.find(key.encode()) for key in CLIENTS[:2])
    assert one.namespace("") == other.namespace("") == ""
    assert one.namespace("salt") == other.namespace("salt") != ""
    assert one.engine_id("r") != other.engine_id("r")


def may(keys):
    """Who of (first client, second client, operator, nobody) is the operator; None: not let in."""
    tenants = Tenants(keys)
    callers = [tenants.find(key) or tenants.anybody for key in (b"k1", b"k2", b"op", b"")]
    return [None if tenant is None else tenant.is_operator for tenant in callers]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (Keys(), [True, True, True, True]),
        (Keys(("k1",)), [True, None, None, None]),
        (Keys(("k1", "k2")), [False, False, None, None]),
        (Keys(("k1",), "op"), [False, None, True, None]),
        (Keys(("k1", "k2"), "op"), [False, False, True, None]),
        (Keys((), "op"), [False, False, True, False]),
        (Keys(("k1", "op"), "op"), [False, None, True, None]),
    ],
)
def test_the_operator_is_who_holds_its_key_or_has_nobody_beside(keys, wanted):
    assert may(keys) == wanted


def test_only_the_operator_goes_before_others():
    tenants = Tenants(Keys(("k1", "k2"), "op"))
    tenants.find(b"op").check_priority(-1)
    tenants.find(b"k1").check_priority(0)
    for refused in (
        lambda: tenants.find(b"k1").check_priority(-1),
        lambda: operator_only(tenants.find(b"k1")),
    ):
        with pytest.raises(ApiError) as raised:
            refused()
        assert (raised.value.status, raised.value.code) == (403, "operator_only")


# -- where keys come from ------------------------------------------------------------------------


def test_keys_may_come_from_files_and_doubles_count_once(tmp_path):
    (tmp_path / "keys").write_text(
        "# of our clients\n\none-key-0123456789abc\r\n  second-key-é  \n"
    )
    (tmp_path / "admin").write_text("the-operators-key-012345\n")
    config = ServerConfig(
        api_keys=["second-key-é"],
        api_key_file=str(tmp_path / "keys"),
        admin_key_file=str(tmp_path / "admin"),
    )
    keys = read_keys(config)
    assert keys.clients == ("second-key-é", "one-key-0123456789abc")
    assert keys.operator == "the-operators-key-012345"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "can't be read"),
        (b"# nothing but this\n", "holds no key"),
        (b"secret\xff\n", "no UTF-8"),
        (b"secret" * 2**18, "over 1048576 bytes"),
    ],
)
def test_a_file_without_keys_is_an_error_that_does_not_show_them(tmp_path, content, reason):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as raised:
        read_keys(ServerConfig(api_key_file=str(path)))
    assert "secret" not in str(raised.value)


def test_two_keys_in_the_operators_file_are_an_error(tmp_path):
    (tmp_path / "admin").write_text("a\nb\n")
    with pytest.raises(ValueError, match="must hold one key"):
        read_keys(ServerConfig(admin_key_file=str(tmp_path / "admin")))


def test_short_keys_are_warned_of_without_being_shown(caplog):
    read_keys(ServerConfig(api_keys=["hunter2", "a-key-that-is-long-enough"]))
    assert "1 of 2 keys are shorter than 16" in caplog.text
    assert "hunter2" not in caplog.text


def test_no_text_about_settings_or_keys_shows_a_key():
    config = ServerConfig(api_keys=CLIENTS, admin_key="the-operator")
    shown = [repr(config), str(config), repr(config.told), repr(read_keys(config))]
    assert not [text for text in shown for key in (*CLIENTS, "the-operator") if key in text]
    for wrong in ({"api_keys": ["secret", ""]}, {"admin_key": 5}, {"admin_key": ""}):
        with pytest.raises(ValueError) as raised:
            ServerConfig(**wrong)
        assert "secret" not in str(raised.value)
