/* Sum an array over the ranks, with and without waiting.
 *
 *     cc examples/all_reduce.c $(python3 -m multiring.embed) -pthread -o all_reduce
 *     multiring run -n 2 ./all_reduce
 */
#include <multiring.h>
#include <semaphore.h>
#include <stdio.h>

static int check(int code, const char* what) {
    if (code != MULTIRING_OK) fprintf(stderr, "%s: %s\n", what, multiring_error());
    return code;
}

static void done(void* context, int code, const char* error) {
    if (code != MULTIRING_OK) fprintf(stderr, "all_reduce: %s\n", error);
    sem_post(context);
}

int main(void) {
    enum { COUNT = 1000 };
    float x[COUNT];
    double weights[3] = {0};
    sem_t arrived;

    if (check(multiring_init(), "init")) return 1;
    const int rank = multiring_rank(), size = multiring_world_size();

    for (int i = 0; i < COUNT; ++i) x[i] = (float)(i + rank);
    sem_init(&arrived, 0, 0);
    if (check(multiring_all_reduce(x, COUNT, MULTIRING_FLOAT32, MULTIRING_AVG, done, &arrived), "all_reduce")) return 1;
    /* ... other work ... */
    sem_wait(&arrived);

    if (rank == 0) weights[0] = weights[1] = weights[2] = 0.5;
    if (check(multiring_broadcast(weights, 3, MULTIRING_FLOAT64, 0, NULL, NULL), "broadcast")) return 1;
    if (check(multiring_barrier(), "barrier")) return 1;

    for (int i = 0; i < COUNT; ++i)
        if (x[i] != (float)i + (float)(size - 1) / 2 || weights[i % 3] != 0.5) {
            fprintf(stderr, "rank %d: element %d is %g\n", rank, i, x[i]);
            return 1;
        }
    printf("rank %d of %d: mean of element 7 is %g\n", rank, size, x[7]);
    return check(multiring_shutdown(), "shutdown");
}
