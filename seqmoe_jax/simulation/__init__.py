"""What a cache policy and a prefetcher would be worth, from a trace alone: a discrete simulation."""
