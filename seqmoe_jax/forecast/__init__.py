"""Which experts the coming steps need."""
