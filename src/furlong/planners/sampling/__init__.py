"""Which chunks of a plan get a backward (SpaCO): rules, plans, what is refused."""
