"""A server of this machine alone answers to its own names, and to those that its owner gives it."""

import json

import pytest
from client import call

from seqmoe_jax.serving.access import Access
from seqmoe_jax.serving.hosts import answered_hosts, is_answered

OWN = ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "[::1]", "a.localhost:1", None]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "", "[::2]"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_on_a_loopback_address_only_local_names_are_answered(address):
    hosts = answered_hosts(address)
    assert all(is_answered(host, hosts) for host in [*OWN, None])
    assert not any(is_answered(host, hosts) for host in FOREIGN)


def test_names_can_be_given_and_others_reach_an_open_address_by_any():
    assert is_answered("box.lan:80", answered_hosts("127.0.0.1", ["Box.lan"]))
    assert not is_answered("evil.example", answered_hosts("127.0.0.1", ["Box.lan"]))
    assert is_answered("evil.example", answered_hosts("127.0.0.1", ["*"]))
    assert is_answered("evil.example", answered_hosts("0.0.0.0"))
    assert not is_answered("evil.example", answered_hosts("0.0.0.0", ["box.lan"]))
    assert is_answered("localhost", answered_hosts("0.0.0.0", ["box.lan"]))


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/none")])
def test_another_host_is_misdirected(serve, method, path):
    with serve(access=Access(hosts=answered_hosts("127.0.0.1"))) as port:
        status, answer = call(port, method, path, b"{}" * 10**6 if method == "POST" else None, {"Host": "evil.example"})
        assert status == 421
        assert "--allow-host" in json.loads(answer)["error"]["message"]
        assert call(port, "GET", "/health", headers={"Host": f"localhost:{port}"})[0] == 200
