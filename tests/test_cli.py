"""The command line: bad input is one line and exit status 2; good input prints text or JSON."""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from scripts.checks.random_checkpoint import make_config, write_checkpoint
from seqmoe_jax import __version__
from seqmoe_jax.cli.main import COMMANDS, main
from seqmoe_jax.cli.terminal import text
from seqmoe_jax.compilation import VARIABLE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a byte-level tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("models") / "tiny"
    config = make_config(layers=2, experts=8, top_k=2, hidden=64, width=32, vocab=300)
    write_checkpoint(directory, config | {"max_position_embeddings": 128, "eos_token_id": None})
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.getbasetemp() / "cache"))


def test_without_a_command_it_prints_help_that_names_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {command.name}" in out for command in COMMANDS)


@pytest.mark.parametrize("module", ["seqmoe_jax", "seqmoe_jax.cli"])
def test_it_runs_as_a_module_and_says_its_version(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"seqmoe {__version__}\n"


def test_saying_what_there_is_loads_neither_jax_nor_the_compiler():
    code = """if True:
        import sys
        from seqmoe_jax.cli.main import COMMANDS, build_parser
        for command in COMMANDS:
            build_parser(command.name)
        sys.exit(bool({"jax", "numba"} & set(sys.modules)))
    """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command.name, "--help"])
    assert ended.value.code == 0
    assert f"usage: seqmoe {command.name}" in capsys.readouterr().out


def run(capsys, *arguments):
    status = main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_has_tokens_and_every_statistic(checkpoint, capsys):
    status, out, _ = run(capsys, checkpoint, "--prompt", "hello", "--max-new-tokens", 5, "--residency", 0.5, "--json")
    assert status == 0
    result = json.loads(out)
    assert len(result["tokens"]) == 5
    assert result["finish_reason"] == "length"
    assert isinstance(result["text"], str)
    stats = result["stats"]
    for name in ("tokens_per_second", "ttft_s", "hit_rate", "experts_loaded", "bytes_moved", "residency", "slots"):
        assert stats[name] >= 0, name
    assert (stats["policy"], stats["backend"], stats["kernels"]) == ("seqmoe", "cpu", "xla")
    assert stats["slots"] == 8
    assert stats["residency"] == 0.5


def test_text_is_the_prompt_and_what_follows_then_a_summary(checkpoint, capsys):
    status, out, err = run(capsys, checkpoint, "--prompt", "hello", "--max-new-tokens", 3, "--residency", "least")
    assert status == 0
    assert out.startswith("hello")
    assert "hit rate" in err.splitlines()[-1]


def test_a_batch_gives_a_list(checkpoint, capsys):
    status, out, _ = run(
        capsys, checkpoint, "--prompt", "a", "--prompt", "bc", "--max-new-tokens", 2, "--policy", "lru", "--json"
    )
    assert status == 0
    assert [len(item["tokens"]) for item in json.loads(out)] == [2, 2]


def test_a_message_is_answered_by_the_template(checkpoint, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    (copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}")
    (copy / "generation_config.json").write_text('{"do_sample": true, "temperature": 5.0}')
    common = ["--max-new-tokens", 4, "--residency", 0.5, "--json"]
    _, plain, _ = run(capsys, copy, "--prompt", "be kind!hello!", *common)
    status, chat, _ = run(
        capsys, copy, "--chat", "--system", "be kind", "--prompt", "hello", "--chat-option", "mark=!", *common
    )
    assert status == 0
    assert json.loads(chat)["tokens"] == json.loads(plain)["tokens"]
    status, text, _ = run(capsys, copy, "--chat", "--prompt", "hello", "--max-new-tokens", 4, "--residency", 0.5)
    assert status == 0
    assert not text.startswith("hello")
    # Greedy unless asked for; then the numbers given replace single ones of the file.
    drawn = [
        json.loads(run(capsys, copy, "--prompt", "be kind!hello!", *common, "--sampling", "model", *more)[1])["tokens"]
        for more in ([], ["--seed", 1], ["--temperature", 0])
    ]
    assert drawn[2] == json.loads(plain)["tokens"]
    assert len({tuple(tokens) for tokens in drawn}) == 3


def test_tokens_beyond_the_vocabulary_of_the_tokenizer_never_come(checkpoint, capsys):
    """The head of this model has 300 rows, its tokenizer 256 tokens; at this temperature all are as likely."""
    _, out, _ = run(capsys, checkpoint, "--prompt", "a", "--temperature", 100, "--max-new-tokens", 60,
                    "--residency", 0.5, "--json")  # fmt: skip
    tokens = json.loads(out)["tokens"]
    assert len(tokens) == 60
    assert max(tokens) < 256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--chat"], "no chat template"),
        (["--prompt", "a", "--system", "b"], "--chat"),
        (["--prompt", "x" * 127, "--max-new-tokens", "2"], "context is 128"),
        (["--prompt", "a", "--residency", "1.5"], "(0, 1]"),
        (["--prompt", "a", "--residency", "0.01"], "the least is 2 slots"),
        (["--prompt", "a", "--prompt", "b", "--residency", "0.15"], "2 sequence"),
        (["--prompt", "a", "--policy", "magic"], "unknown policy"),
        (["--prompt", "a", "--device-memory", "much"], "memory size"),
        (["--prompt", "a", "--device-memory", "1MB"], "needs at least"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--max-new-tokens", "0"], "an integer from 1"),
        (["--prompt", "a", "--dtype", "int4"], "dtype"),
        (["--prompt", "a", "--stop", ""], "stop"),
    ],
)
def test_bad_options_are_one_line_and_status_2(checkpoint, capsys, arguments, words):
    status, out, err = run(capsys, checkpoint, "--json", *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def damage_nothing_there(directory):
    shutil.rmtree(directory)


def damage_config(directory):
    (directory / "config.json").write_text("{")


def damage_architecture(directory):
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))


def damage_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


def damage_truncate(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def damage_header(directory):
    file = directory / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def damage_shape(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 64}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_nothing_there, "no such directory"),
        (damage_config, "config.json"),
        (damage_architecture, "'bert' is not supported"),
        (damage_tokenizer, "tokenizer.json"),
        (damage_truncate, "model.safetensors"),
        (damage_header, "model.safetensors"),
        (damage_shape, "wrong shape"),
    ],
)
def test_damaged_models_are_one_line_and_status_2(checkpoint, tmp_path, capsys, damage, words):
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    damage(copy)
    status, out, err = run(capsys, copy, "--prompt", "a", "--json")
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_an_unwritable_cache_directory_is_named(checkpoint, tmp_path, capsys, monkeypatch):
    import jax

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    try:
        status, _, err = run(capsys, checkpoint, "--prompt", "a", "--json")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert status == 2
    assert VARIABLE in err


def test_doctor_says_what_runs(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == "xla"
    assert report["backend"] == "cpu"
    assert "pinned_host" in report["memory_kinds"]
    assert report["host_to_device"] > 0
    assert "qwen3-30b-a3b-fp8" in report["presets"]
    assert main(["doctor"]) == 0
    assert "kernels: xla" in capsys.readouterr().out


def process(*words, redirect="", env=(), **options):
    """Status and streams of a command that a shell runs."""
    command = " ".join(shlex.quote(str(word)) for word in (sys.executable, "-m", "seqmoe_jax", *words))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {redirect}"], capture_output=True, stdin=subprocess.DEVNULL,
        env={**os.environ, **dict(env)}, timeout=300, **options,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


@pytest.mark.parametrize(
    ("redirect", "status", "words"),
    [
        ("| true", 141, ""),
        ("> /dev/full", 2, "standard output: No space left on device"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_what_is_printed_may_go_nowhere(redirect, status, words):
    came, _, err = process("plan", redirect=redirect)
    assert "Traceback" not in err
    assert "Exception" not in err
    assert (came, words in err) == (status, True), err


def test_help_may_be_cut_short():
    status, out, err = process("--help", redirect="| head -n 1")
    assert (status in (0, 141), out.count(b"\n"), err) == (True, 1, "")


def test_a_file_is_not_opened_in_place_of_a_closed_stream(tmp_path):
    """The next file opened would get descriptor 2, and what libraries print there."""
    code = (
        "import os; from seqmoe_jax.cli.terminal import open_streams; open_streams(); print(os.open('x', os.O_CREAT))"
    )
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c {shlex.quote(code)} 2>&- <&-"], cwd=tmp_path, capture_output=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert int(done.stdout) > 2


def test_a_terminal_of_any_encoding_gets_replacement_characters(checkpoint):
    words = ["generate", checkpoint, "--prompt", "Hi 🙂 é", "--max-new-tokens", 2, "--residency", 0.5]
    latin = process(*words, env={"PYTHONIOENCODING": "latin-1"}.items())
    assert latin[0] == 0
    assert latin[1].startswith(b"Hi ? \xe9")
    # A locale that is not UTF-8, where the words of the command line are no text for Python.
    plain = process(*words, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items())
    assert plain[0] == 0
    assert plain[1].startswith(b"Hi ? ?")


def test_words_that_are_no_utf_8_are_text_with_replacement_characters():
    assert text("Hi \udcf0\udc9f\udc99\udc82 \udcff") == "Hi 🙂 \ufffd"
    assert text("Hi 🙂") == "Hi 🙂"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genrate"], "invalid choice: 'genrate'"),
        (["generate"], "required: --prompt"),
        (["generate", "--promt", "a"], "unknown option --promt; did you mean --prompt?"),
        (["generate", "--prompt", "a", "--residencey=1"], "unknown option --residencey; did you mean --residency"),
        (["generate", "--prompt", "-a"], "--option=-TEXT"),
        (["generate", "--prompt", "a", "--residency", "nan"], "must be a number in (0, 1] or 'least', got 'nan'"),
        (["generate", "--prompt", "a", "--temperature", "inf"], "--temperature: must be a number"),
        (["generate", "--prompt", "a", "--seed", "9" * 5000], "--seed: must be a whole number"),
        (["generate", "demoo", "--prompt", "a"], "did you mean demo?"),
        (["generate", "qwen3-30b-a3b", "--prompt", "a"], "is a preset: add --random-weights"),
        (["generate", "gpt-oss-20", "--prompt", "a"], "did you mean gpt-oss-20b"),
        (["generate", "gpt-oss-20", "--prompt", "a", "--random-weights"], "did you mean gpt-oss-20b"),
        (["generate", "../configs/gpt-oss-20b", "--prompt", "a", "--random-weights"], "unknown preset '../configs"),
        (["trace", "--prompts", "none.txt", "--out", "/dev/null"], "/dev/null is a device"),
        (["trace", "--prompts", "none.txt", "--out", ""], "expected the name of a file to write, got ''"),
        (["trace", "--prompts", "none.txt", "--out", "T.npz"], "no such file"),
        (["trace", "--prompts", "none.txt", "--out", "T.npz", "--batch", "9"], "--batch: must be from 1 to 8, got 9"),
        (["train-predictor", "none.npz", "--out", "/dev/null"], "/dev/null is no directory"),
        (["simulate", "none.npz", "--residency", "0"], "--residency: must be above 0 and at most 1, got 0"),
        (["simulate", "none.npz", "--residency", "1", "--transfer-cost", "-1"], "--transfer-cost: must be above 0"),
        (["simulate", "none.npz", "--residency", "1", "--horizon", "-1"], "--horizon: must be from 0"),
        (["bench", "--steps", "0"], "--steps: must be from 1"),
        (["bench", "--out", "."], ". is a directory"),
    ],
)
def test_plausible_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_no_cache_directory_is_taken_for_the_current_one(checkpoint, capsys, monkeypatch):
    import jax

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv(VARIABLE, "")
    assert main(["doctor"]) == 0
    assert f"compilation cache: {VARIABLE} is empty" in capsys.readouterr().out
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        status, _, err = run(capsys, checkpoint, "--prompt", "a", "--json")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (status, err) == (2, f"seqmoe: {VARIABLE} is empty: set it to a directory, or unset it\n")


def test_a_device_that_is_not_there_is_one_line():
    status, out, err = process("doctor", env={"JAX_PLATFORMS": "magic"}.items())
    assert (status, out, len(err.splitlines())) == (2, b"", 1)
    assert "JAX finds no device (JAX_PLATFORMS is 'magic')" in err


@pytest.mark.parametrize("module", ["seqmoe_jax.cli.generate", "seqmoe_jax.api", "jax"])
def test_an_interrupt_is_status_130_wherever_it_comes(module):
    """While a module is imported, too: what is raised there may be another error, caused by it."""
    code = f"""if True:
        import builtins, sys
        from seqmoe_jax.__main__ import main
        real = builtins.__import__
        class Interrupting:
            def __set_name__(self, owner, name):
                raise KeyboardInterrupt
        def importing(name, *rest):
            if name == {module!r}:
                type("Made", (), {{"field": Interrupting()}})
            return real(name, *rest)
        builtins.__import__ = importing
        sys.argv[1:] = ["generate", "demo", "--prompt", "a"]
        main()
    """
    if module == "seqmoe_jax.cli.generate":
        code = code.replace("real = builtins", "import seqmoe_jax.cli.main as command\n        real = builtins")
        code = code.replace("builtins.__import__ = importing", "command.import_module = importing")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "seqmoe: interrupted\n")
