"""A client of a server on this machine that sees statuses and bytes as they are."""

import json
import socket
from http.client import HTTPConnection

HELLO = [{"role": "user", "content": "Hello"}]
JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"


def call(port, method, path, body=None, headers=JSON):
    """Status and bytes of an answer; a body that is an object or a list is sent as JSON."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, json.dumps(body) if isinstance(body, (dict, list)) else body, dict(headers))
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def post(port, path, **body):
    status, data = call(port, "POST", path, body)
    return status, json.loads(data)


def events(port, path, **body):
    """The chunks of a stream."""
    status, data = call(port, "POST", path, body | {"stream": True})
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def raw(port, data, *, shut=False, timeout=60):
    """What comes back until the server closes, for bytes as they are; `shut` says that no more follow."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(data)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
