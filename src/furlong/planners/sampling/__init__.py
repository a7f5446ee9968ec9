"""The draw of the chunks that get a backward (SpaCO): rules, plans, refusals."""
