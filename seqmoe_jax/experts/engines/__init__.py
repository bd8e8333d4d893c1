"""Transfer engines: what moves experts ahead of their use. One interface (`base`), several implementations."""
