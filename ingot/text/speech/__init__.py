"""How English texts are pronounced, in the signs that Kokoro's models were trained with."""
