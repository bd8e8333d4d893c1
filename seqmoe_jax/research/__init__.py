"""What `sm` offers to whoever studies routing: plans, simulations, forecasts and their training, each one call."""
