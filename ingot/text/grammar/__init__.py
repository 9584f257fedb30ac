"""Answers held to a grammar: JSON schemas, regular expressions, choices, Lark, and calls in a family's own form."""
