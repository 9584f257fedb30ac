"""How words are pronounced that no dictionary has: by their letters, as English mostly goes."""

from __future__ import annotations

import re

from ingot.text.speech.dictionary import Accent, stressed

RULES = (
    # The first that matches where a word is read; endings and beginnings come before letters.
    ("^kn", "n"), ("^gn", "n"), ("^ps", "s"), ("^wr", "ɹ"), ("^x", "z"), ("^mc", "mək"),
    ("ation$", "ˈAʃən"),
    ("tion$", "ʃən"), ("tions$", "ʃənz"), ("sion$", "ʒən"), ("cian$", "ʃən"), ("cious$", "ʃəs"), ("tious$", "ʃəs"),
    ("ture$", "ʧəɹ"), ("ously$", "əsli"), ("ous$", "əs"), ("ology$", "ˈɑləʤi"), ("able$", "əbᵊl"), ("ible$", "əbᵊl"),
    ("ing$", "ɪŋ"), ("ings$", "ɪŋz"), ("less$", "ləs"), ("ness$", "nəs"), ("ment$", "mənt"), ("tle$", "tᵊl"),
    ("ble$", "bᵊl"), ("ple$", "pᵊl"), ("dle$", "dᵊl"), ("gle$", "ɡᵊl"), ("kle$", "kᵊl"), ("ies$", "iz"), ("ied$", "id"),
    ("ity$", "əti"), ("ism$", "ɪzəm"), ("ey$", "i"), ("que$", "k"), ("gue$", "ɡ"), ("mb$", "m"), ("es$", "z"),
    ("eigh", "A"), ("igh", "I"), ("ough", "ɔ"), ("augh", "ɔ"), ("tch", "ʧ"), ("dge", "ʤ"), ("sch", "sk"), ("chr", "kɹ"),
    ("eau", "O"), ("air", "ɛɹ"), ("are$", "ɛɹ"), ("ear", "ɪɹ"), ("eer", "ɪɹ"), ("oor", "ɔɹ"), ("our", "ɔɹ"),
    ("ire$", "Iəɹ"),
    ("ch", "ʧ"), ("sh", "ʃ"), ("th", "θ"), ("ph", "f"), ("wh", "w"), ("gh", "ɡ"), ("ck", "k"), ("ng", "ŋ"),
    ("qu", "kw"),
    ("ss", "s"), ("ll", "l"), ("tt", "t"), ("pp", "p"), ("bb", "b"), ("dd", "d"), ("ff", "f"), ("gg", "ɡ"), ("mm", "m"),
    ("nn", "n"), ("rr", "ɹ"), ("zz", "z"), ("kk", "k"), ("cc", "k"),
    ("ai", "A"), ("ay", "A"), ("au", "ɔ"), ("aw", "ɔ"), ("ee", "i"), ("ea", "i"), ("ei", "i"), ("ie", "i"), ("eu", "u"),
    ("ew", "u"), ("oa", "O"), ("oe", "O"), ("oi", "Y"), ("oy", "Y"), ("oo", "u"), ("ou", "W"), ("ow", "O"), ("ui", "u"),
    ("ue", "u"), ("er$", "əɹ"), ("ar", "ɑɹ"), ("er", "ɜɹ"), ("ir", "ɜɹ"), ("or", "ɔɹ"), ("ur", "ɜɹ"),
    ("a(?=[bcdfgklmnpstvz]e)", "A"), ("i(?=[bcdfgklmnpstvz]e)", "I"), ("o(?=[bcdfgklmnpstvz]e)", "O"),
    ("u(?=[bcdfgklmnpstvz]e)", "u"), ("a$", "ə"), ("e$", ""), ("i$", "i"), ("o$", "O"), ("u$", "u"), ("y$", "i"),
    ("c(?=[eiy])", "s"), ("g(?=[eiy])", "ʤ"), ("^y", "j"), ("y(?=[aeiou])", "j"), ("s(?<=[aeiou]s)(?=[aeiou])", "z"),
    *zip("abcdefghijlmnopqrstuvwyz", "æbkdɛfɡhɪʤlmnɑpkɹstʌvwɪz", strict=True), ("k", "k"), ("x", "ks"),
)  # fmt: skip
COMPILED = [(re.compile(pattern.removeprefix("^")), pattern.startswith("^"), said) for pattern, said in RULES]
BRITISH = (
    ("ɜɹ", "ɜː"),
    ("ɑɹ", "ɑː"),
    ("ɔɹ", "ɔː"),
    ("ɛɹ", "ɛː"),
    ("əɹ", "ə"),
    ("O", "Q"),
    ("i", "iː"),
    ("u", "uː"),
    ("ɔ(?!ː)", "ɔː"),
)


def by_letters(word: str, accent: Accent) -> str:
    """`word` has small letters from a to z alone."""
    said, at = "", 0
    while at < len(word):
        for pattern, begins, phonemes in COMPILED:
            found = None if begins and at else pattern.match(word, at)
            if found is not None and found.end() > at:
                said, at = said + phonemes, found.end()
                break
    if accent == "gb":
        for american, british in BRITISH:
            said = re.sub(american, british, said)
    return stressed(said)
