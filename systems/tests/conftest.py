"""Files of tests: real ones, if they are there, and those that a test writes."""

import pytest


@pytest.fixture
def real(data_dir):
    """Gives the path of a data set; a test that lacks it is skipped."""
    def path_of(name):
        if not (data_dir / name).exists():
            pytest.skip(f"no {name} in the folder of data sets")
        return data_dir / name

    return path_of


@pytest.fixture
def written(tmp_path):
    """Writes a file, of text or of bytes, into the folder of the test; its path."""
    def path_of(name, content):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name

    return path_of
