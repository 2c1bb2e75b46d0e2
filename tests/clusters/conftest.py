"""These tests need what `make test-engines` installs: elsewhere they are not collected."""

from importlib.util import find_spec

NEEDS = {"test_spark.py": "pyspark", "test_dask.py": "distributed", "test_ray.py": "ray"}
collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]
