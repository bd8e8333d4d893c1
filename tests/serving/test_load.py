"""Under load from clients of all kinds at once, every answer is the one that its request gets alone."""

import json
import random
import socket
import threading
import time
from http.client import HTTPConnection

import pytest
from client import COMPLETIONS, HELLO, JSON, call, events, post, raw
from test_departures import WHOLE, until_idle

GREEDY = [dict(prompt=prompt, max_tokens=length) for prompt in ("def add(a, b):", "Once") for length in (1, 6, 9)]
DRAWN = [dict(prompt="Once", max_tokens=7, temperature=0.9, seed=seed) for seed in range(3)]
ASKED = [*GREEDY, *DRAWN, dict(prompt=["A", "def add(a, b):", "C"], max_tokens=4), dict(prompt="Once", stop="\n")]
GARBAGE = [b"", b"\x16\x03\x01" + bytes(200), b"GET / HTTP/9.9\r\n\r\n", b"POST " + b"/" * 70_000, WHOLE[:40]]


def texts(choices):
    return {choice["index"]: choice["text"] for choice in choices}


def streamed(port, body):
    found = {}
    for chunk in events(port, COMPLETIONS, **body):
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


class Client(threading.Thread):
    """Does one thing after the other, by chance; what went wrong is in `faults`."""

    def __init__(self, port, alone, seed, turns):
        super().__init__()
        self.port, self.alone, self.dice, self.turns, self.faults = port, alone, random.Random(seed), turns, []
        self.done = dict.fromkeys(["asks", "streams", "leaves", "garbage", "large", "slow", "refused", "looks"], 0)

    def run(self):
        for _ in range(self.turns):
            kind = self.dice.choice([*self.done, "asks", "asks", "streams", "leaves"])
            try:
                getattr(self, kind)()
            except Exception as error:
                self.faults.append((kind, repr(error)))
            self.done[kind] += 1

    def asks(self):
        at = self.dice.randrange(len(ASKED))
        status, answer = post(self.port, COMPLETIONS, **ASKED[at])
        assert status == 200, answer
        assert texts(answer["choices"]) == self.alone[at]

    def streams(self):
        at = self.dice.randrange(len(ASKED))
        assert streamed(self.port, ASKED[at]) == self.alone[at]

    def leaves(self):
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(WHOLE[: self.dice.choice([20, -10, len(WHOLE)])])
            time.sleep(self.dice.uniform(0, 0.1))

    def garbage(self):
        raw(self.port, self.dice.choice(GARBAGE), shut=True)

    def large(self):
        status, _ = call(
            self.port, "POST", COMPLETIONS, b'{"prompt": "' + b"a" * self.dice.choice([300_000, 2_000_000])
        )
        assert status in (400, 413)

    def slow(self):
        at = self.dice.randrange(len(ASKED))
        body = json.dumps(ASKED[at]).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest("POST", COMPLETIONS)
        for name, value in {**JSON, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        for part in (body[:5], body[5:11], body[11:]):
            connection.send(part)
            time.sleep(0.05)
        assert texts(json.loads(connection.getresponse().read())["choices"]) == self.alone[at]
        connection.close()

    def refused(self):
        body = self.dice.choice([dict(prompt="a", min_tokens=3), dict(prompt="a" * 2000), dict(messages=HELLO), {}])
        assert post(self.port, COMPLETIONS, **body)[0] == 400

    def looks(self):
        assert call(self.port, "GET", "/health")[0] == 200


def load(port, *, clients, turns, seed):
    alone = [texts(post(port, COMPLETIONS, **body)[1]["choices"]) for body in ASKED]
    working = [Client(port, alone, seed + at, turns) for at in range(clients)]
    for client in working:
        client.start()
    for client in working:
        client.join()
    until_idle(port)
    assert [fault for client in working for fault in client.faults] == []
    assert [texts(post(port, COMPLETIONS, **body)[1]["choices"]) for body in ASKED] == alone
    return {kind: sum(client.done[kind] for client in working) for kind in working[0].done}


def test_a_minute_of_everything(port, faults):
    done = load(port, clients=6, turns=8, seed=0)
    assert sum(done.values()) == 48
    assert all(done.values())
    assert faults == []


@pytest.mark.slow
def test_an_hour_of_everything(port, faults):
    print(load(port, clients=24, turns=150, seed=100))
    assert faults == []
