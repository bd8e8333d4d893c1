"""What the choosing kernel covers."""

from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrt-softplus", "chosen-softmax"]

MAX_EXPERTS = 512  # scores that one warp holds, 16 a thread
MAX_CHOSEN = 16  # rounds
