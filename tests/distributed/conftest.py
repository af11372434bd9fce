import pytest

from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def processes():
    found = Processes(4)
    yield found
    found.close()
