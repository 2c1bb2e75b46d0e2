"""These tests need what `make test-engines` installs: elsewhere they are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("pyspark") else ["test_spark.py"]
