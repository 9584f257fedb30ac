"""SpecPrefill: long prompts of which only the tokens that matter are computed, when a request asks for it.

A scorer says how much each token matters (`scorers`), a pure function chooses (`selection`), and the prompt is
thinned out before it runs (`prefill`).
"""
