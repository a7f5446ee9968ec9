"""The papers' printed numbers beside ours, and those of their own forms and algorithms that only
these tables and tests use. `../paper_numbers.py` writes them into docs/paper_numbers.md."""
