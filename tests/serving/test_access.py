"""Keys, origins and names: who may ask, and under which name."""

import json
from http.client import HTTPConnection

import pytest
from client import COMPLETIONS, HELLO, JSON, call, post

from seqmoe_jax.cli.main import main
from seqmoe_jax.errors import ConfigError
from seqmoe_jax.serving.access import Access

PAGE = "http://localhost:3000"


def head(port, method, path, headers):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}


@pytest.fixture(scope="module")
def guarded(serve):
    with serve(access=Access(key="secret", origins=[PAGE]), aliases=["gpt-4o", "tiny", "small"]) as port:
        yield port


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer"}, {"Authorization": "Basic secret"},
     {"Authorization": "secret"}, {"X-Api-Key": "other"}, {"Authorization": "Bearer \xe9"},
     {"Authorization": "Bearer other", "X-Api-Key": "secret"}],
)  # fmt: skip
def test_without_the_key_there_is_no_answer(guarded, headers):
    for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/tokenize"),
                         ("GET", "/none"), ("GET", "/health/")):  # fmt: skip
        status, answer = call(guarded, method, path, {"prompt": "a"} if method == "POST" else None, JSON | headers)
        assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key"), path
    assert head(guarded, "GET", "/v1/models", headers)[1]["www-authenticate"] == "Bearer"
    assert call(guarded, "GET", "/health", headers=headers)[0] == 200


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer secret"}, {"authorization": "bearer  secret"},
                                     {"X-Api-Key": "secret"}])  # fmt: skip
def test_with_the_key_there_is(guarded, headers):
    assert call(guarded, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, JSON | headers)[0] == 200


def test_the_official_client_sends_the_key(guarded):
    openai = pytest.importorskip("openai")
    for key, names in (("secret", ["tiny", "gpt-4o", "small"]), ("other", None)):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{guarded}/v1", api_key=key, max_retries=0) as client:
            if names is None:
                with pytest.raises(openai.AuthenticationError, match="wants its API key"):
                    client.models.list()
            else:
                assert [model.id for model in client.models.list()] == names
                assert client.models.retrieve("gpt-4o").id == "gpt-4o"
                answer = client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=1)
                assert answer.model == "gpt-4o"
                with pytest.raises(openai.NotFoundError, match="this server has 'tiny' or 'gpt-4o' or 'small'"):
                    client.chat.completions.create(model="gpt-5", messages=HELLO)


def test_a_page_of_the_origin_may_ask_and_no_other(guarded):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    status, headers = head(guarded, "OPTIONS", COMPLETIONS, asks)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    status, headers = head(guarded, "GET", "/v1/models", {"Origin": PAGE})
    assert (status, headers["access-control-allow-origin"]) == (401, PAGE)
    status, headers = head(guarded, "OPTIONS", COMPLETIONS, asks | {"Origin": "http://evil.example"})
    assert (status, headers.get("access-control-allow-origin")) == (400, None)
    _, headers = head(guarded, "GET", "/health", {"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in headers


def test_by_default_no_page_may_ask(port):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    status, headers = head(port, "OPTIONS", COMPLETIONS, asks)
    assert status == 405
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("key", ["", "a b", "\xe9", "a\n"])
def test_a_key_that_no_header_can_have_is_refused(key):
    with pytest.raises(ConfigError, match="--api-key"):
        Access(key=key)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cors", "localhost:3000"], "--cors must be an origin"),
        (["--cors", "http://localhost:3000/"], "--cors must be an origin"),
        (["--api-key", ""], "--api-key is empty"),
        (["--drain-seconds", "-1"], "--drain-seconds must be from 0"),
        (["--drain-seconds", "nan"], "--drain-seconds must be from 0"),
    ],
)
def test_the_command_says_what_is_wrong_before_it_loads_a_model(capsys, words, said):
    assert main(["serve", "/nowhere", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_key_may_be_in_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("SEQMOE_API_KEY", "a b")
    assert main(["serve", "/nowhere"]) == 2
    assert "--api-key must be printable" in capsys.readouterr().err


def test_tokens_and_texts(port, engine):
    status, answer = post(port, "/tokenize", prompt="def add", model="tiny")
    tokens = engine.tokenizer.encode("def add")
    assert (status, answer) == (200, {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None})
    assert post(port, "/detokenize", tokens=tokens) == (200, {"prompt": "def add"})
    assert post(port, "/detokenize", tokens=[]) == (200, {"prompt": ""})
    status, answer = post(port, "/tokenize", messages=HELLO)
    assert answer["tokens"] == engine.request(messages=HELLO).tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 70_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, None),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, 400, "return_token_strs"),
        ("/tokenize", {"promt": "a"}, 400, "promt"),
        ("/tokenize", {"messages": [3]}, 400, "messages[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
    ],
)
def test_faults_of_these_name_the_field(port, path, body, status, param):
    got, answer = post(port, path, **body)
    assert (got, answer["error"]["param"]) == (status, param)
