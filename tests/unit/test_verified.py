"""Promise: docs/verified.md is what docs/tools/catalogue.py makes of the certificates."""

from docs.tools.catalogue import PAGE, catalogue, read


def test_page_is_that_of_the_certificates() -> None:
    old, new = (
        text.replace("changed since", "that of today")
        for text in (PAGE.read_text(), catalogue(read(), PAGE.read_text()))
    )
    assert old == new, "type make verified"
