"""Calls whose loss is the caller's: values of tokens, hidden states, sums over tokens."""
