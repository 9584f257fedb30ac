"""Structured output: JSON schemas, regular expressions, choices, Lark, and calls in a family's own form.

`Grammars` compiles what clients ask for. A `CompiledGrammar` is shared and never changes; it makes a `GrammarMatcher`
for each sequence, which computes the masks of allowed tokens.
"""
