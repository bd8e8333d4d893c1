"""Other people's offloading engines on the work of `seqmoe bench`."""
