"""Small PDFs, written by hand."""

from __future__ import annotations


def pdf(*pages: tuple[float, float], drawn: bytes = b"1 0 0 rg 0 0 20 20 re f", rotate: int = 0) -> bytes:
    """Pages of these sizes in points, each with a red square in its lower left corner."""
    first = 4
    kids = b" ".join(b"%d 0 R" % (first + at) for at in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(pages), kids),
        b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn),
        *(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 {width} {height}]/Rotate {rotate}/Contents 3 0 R>>".encode()
            for width, height in pages
        ),
    ]
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(places) + 1, table)
    return bytes(out)
