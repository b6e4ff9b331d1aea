import pytest

from tests.support.reports import write_run


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path / "my-run")
