"""Two hosts that the tests of a file share."""

from collections.abc import Iterator

import pytest

from support.hosts import Hosts, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made
