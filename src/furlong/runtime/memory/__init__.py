"""Memory of a step: the ledger of what lives, pools of tiers, the heap, and how much is in use."""
