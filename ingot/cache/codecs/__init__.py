"""KV codecs, which quantise the keys and values of cached records and live pages. See docs/codecs.md."""
