"""What a request that cannot be answered gets instead of an answer."""

from __future__ import annotations

from seqmoe_jax.errors import SeqMoEError


class Refusal(SeqMoEError):
    """A request is refused with a status. `param` names the field at fault, `code` is OpenAI's word for some faults."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Gone(Exception):
    """The client has left: nobody waits for an answer any more."""
