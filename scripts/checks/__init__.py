"""What shows that the product holds what it promises, run for longer than tests are."""
