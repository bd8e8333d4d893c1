"""What a maintainer runs; not part of the installed package."""
