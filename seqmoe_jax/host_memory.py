"""How much memory this machine has."""

import os


def host_memory_bytes() -> int:
    """All of the host's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
