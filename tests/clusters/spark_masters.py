"""Where the tests of Spark run: in its local mode, and in a cluster of two executors on this machine."""

LOCAL, CLUSTER = "local[3]", "local-cluster[2,1,1024]"
