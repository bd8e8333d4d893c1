"""Runs of an engine whose answers are made up."""


class Scripted:
    """A run as the scheduler sees it: `pieces(number, request)` gives the pieces of a request, one after another."""

    def __init__(self, pieces, poll):
        self._pieces, self._poll = pieces, poll
        self._requests, self.answers = [], {}
        self._at = 0

    @property
    def free(self):
        return 1 - (len(self._requests) - self._at)

    def add(self, request):
        self._requests.append(request)
        return len(self._requests) - 1

    def drop(self, number):
        pass

    def __iter__(self):
        self._poll()
        while self._at < len(self._requests):
            yield from self._pieces(self._at, self._requests[self._at])
            self._at += 1
            self._poll()


def scripted(pieces):
    """In the place of `Engine.run`."""
    return lambda poll: Scripted(pieces, poll)


class Held:
    """A run that waits for a permit before each piece, at most 2 s."""

    def __init__(self, run, permits):
        self._run, self._permits = run, permits

    def __getattr__(self, name):
        return getattr(self._run, name)

    def __iter__(self):
        for piece in self._run:
            self._permits.acquire(timeout=2.0)
            yield piece
