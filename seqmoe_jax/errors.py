"""What can go wrong because of input, said in one line: what was expected, what came, what to do.

The command line turns every `SeqMoEError` into that line and exit status 2.
"""

MOST_LINE = 1000  # characters


class SeqMoEError(Exception):
    """Base of every error that the caller can mend. Its message is one line, whatever was put into it: names and values
    from outside may hold line breaks, terminal codes and megabytes."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


def one_line(text: str) -> str:
    """A text without line breaks and unprintable characters, its middle left out where it is long."""
    if len(text) > MOST_LINE:
        text = f"{text[: MOST_LINE - 200]} ... {text[-150:]}"
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))
    return line if len(line) <= MOST_LINE else f"{line[: MOST_LINE - 4]} ..."


class CheckpointError(SeqMoEError):
    """A model directory or one of its files is missing, damaged, or not what its header says."""


class ConfigError(SeqMoEError):
    """A field of a configuration is missing, of a wrong type, or names something unsupported."""


class ResidencyError(SeqMoEError):
    """The residency or device memory asked for cannot run this model and batch."""


class PromptError(SeqMoEError):
    """A prompt is empty, too long for the context, or cannot be encoded."""


class EngineError(SeqMoEError):
    """An engine is closed, or has a generation open that the caller itself would have to go on with."""


class NonFiniteError(SeqMoEError):
    """A step gave logits that are no numbers: damaged weights, or activations beyond what their dtype holds."""


class TraceError(SeqMoEError):
    """A trace or a file of forecasts is missing, damaged, or of another model than asked for."""


class PredictorError(SeqMoEError):
    """A predictor is missing, damaged, or of another model or shape than what it is used with."""


class OutputError(SeqMoEError):
    """A result cannot be written where it was asked for, or something else is there that was not to be replaced."""


class ServerError(SeqMoEError):
    """The server cannot take a request now: it is full or shutting down."""


class ProfileError(SeqMoEError):
    """A profile says nothing of the device, because its backend makes none."""


def was_interrupt(error: BaseException) -> bool:
    """Python turns an interrupt in the making of a class into another error, and so do callbacks."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, KeyboardInterrupt):
        chain = chain.__cause__ or chain.__context__
    return chain is not None
