"""What a plan costs: FLOPs, bytes and seconds of its actions, from plain numbers."""
