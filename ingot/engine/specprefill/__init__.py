"""Long prompts of which only what matters is computed, when a request asks for it: a scorer says what that is
(`scorer`), a pure function chooses (`selection`), and the prompt is thinned out before it runs (`thinned`,
`prefill`)."""
