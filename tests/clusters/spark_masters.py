"""Spark's masters in the tests: its local mode, and a cluster of two executors on this machine."""

LOCAL, CLUSTER = "local[3]", "local-cluster[2,1,1024]"
