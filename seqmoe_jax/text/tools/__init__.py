"""Tools that a model may call: as requests declare them, and its calls of them as they stand in a reply's text."""

from seqmoe_jax.text.tools.declared import Tools, check_tools
from seqmoe_jax.text.tools.forms import Form, form_of
from seqmoe_jax.text.tools.reader import CallReader
from seqmoe_jax.text.tools.reading import Arguments, Begin, Broken, End, Event, Text

__all__ = [
    "Arguments", "Begin", "Broken", "CallReader", "End", "Event", "Form", "Text", "Tools", "check_tools", "form_of",
]  # fmt: skip
