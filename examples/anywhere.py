"""Fit a line to points that are divided among the ranks, whoever started them.

python examples/anywhere.py                           one process
multiring run -n 2 examples/anywhere.py               also torchrun, mpirun -n 2 python, srun -n 2 python
multiring.spark.run(anywhere.main, num_proc=2)        in Spark's driver, as any function
multiring.dask.run(client, anywhere.main)             in Dask's client, after client.upload_file("examples/anywhere.py")
DataParallelTrainer(anywhere.main, backend_config=multiring.ray.MultiringConfig(), ...).fit()     in Ray's
"""

import numpy as np

import multiring as mr

POINTS, STEPS = 1200, 200


def main():
    mr.init()  # finds what the launcher said; in a job that a cluster engine started it is there already
    x = np.linspace(-1, 1, POINTS)[mr.shard(POINTS)]
    y = 3 * x - 2
    slope, offset = np.zeros(2)
    for _ in range(STEPS):
        error = slope * x + offset - y
        sums = np.array([error @ x, error.sum(), len(x)])
        mr.all_reduce(sums)  # over all points, so that each rank takes the same step
        slope, offset = np.array([slope, offset]) - 0.5 * sums[:2] / sums[2]
    return mr.rank(), mr.world_size(), round(float(slope), 6), round(float(offset), 6)


if __name__ == "__main__":
    print("rank {} of {}: y = {} x + {}".format(*main()), flush=True)
