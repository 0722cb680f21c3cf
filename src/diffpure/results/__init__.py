"""Rows of evaluations and the numbers that are views of them: rates, rules, results, comparisons. No torch here."""
