"""Runs pytest on the files that a py_test names."""

import sys

import pytest

sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
