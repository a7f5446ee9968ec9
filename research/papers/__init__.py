"""The papers' printed numbers beside ours, and those of their own forms, algorithms and bounds that
only these tables, the comparison and tests use. `../paper_numbers.py` writes them into
docs/research/paper_numbers.md."""
