/* Every function of multiring.h, and what it answers when it cannot be served. Prints one line a finding. */
#include <multiring.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct outcome {
    sem_t done;
    int code;
    char error[1000];
};

static void note(void* context, int code, const char* error) {
    struct outcome* outcome = context;
    outcome->code = code;
    snprintf(outcome->error, sizeof outcome->error, "%s", error);
    sem_post(&outcome->done);
}

static void end(void* context, int code, const char* error) {
    (void)context, (void)error;
    if (code) _exit(10 + code);
}

static void say(const char* what, int code) {
    printf("%s: %d %s\n", what, code, code ? multiring_error() : "");
    fflush(stdout);
}

int main(int count, char** arguments) {
    double x[3] = {1, 2, 3};
    struct outcome outcome;
    sem_init(&outcome.done, 0, 0);

    say("early", multiring_all_reduce(x, 3, MULTIRING_FLOAT64, MULTIRING_SUM, NULL, NULL));
    const int started = multiring_init();
    say("init", started);
    if (started) return 1;
    const int rank = multiring_rank(), size = multiring_world_size();
    say("negative", multiring_all_reduce(x, (size_t)-1, MULTIRING_FLOAT64, MULTIRING_SUM, NULL, NULL));
    say("null", multiring_all_reduce(NULL, 3, MULTIRING_FLOAT64, MULTIRING_SUM, NULL, NULL));
    say("dtype", multiring_all_reduce(x, 3, (multiring_dtype)99, MULTIRING_SUM, NULL, NULL));
    say("op", multiring_all_reduce(x, 3, MULTIRING_INT32, MULTIRING_AVG, NULL, NULL));
    say("root", multiring_broadcast(x, 3, MULTIRING_FLOAT64, size, NULL, NULL));
    say("empty", multiring_all_reduce(NULL, 0, MULTIRING_FLOAT64, MULTIRING_SUM, NULL, NULL));

    for (int i = 0; i < 3; ++i) x[i] = 10 * i + rank;
    multiring_all_reduce(x, 3, MULTIRING_FLOAT64, MULTIRING_MAX, note, &outcome);
    sem_wait(&outcome.done);
    printf("max: %d %g %g %g\n", outcome.code, x[0], x[1], x[2]);
    x[0] = rank;
    multiring_broadcast(x, 1, MULTIRING_FLOAT64, size - 1, NULL, NULL);
    printf("broadcast: %g\n", x[0]);
    say("barrier", multiring_barrier());

    uint64_t bits[2] = {UINT64_C(1) << 63 | rank, UINT64_C(3) << (4 * rank)};
    say("bits", multiring_all_reduce(bits, 2, MULTIRING_UINT64, MULTIRING_BXOR, NULL, NULL));
    printf("bxor: %llx %llx\n", (unsigned long long)bits[0], (unsigned long long)bits[1]);
    unsigned char truth[3] = {rank == 0 ? 7 : 0, 1, 0};
    multiring_all_reduce(truth, 3, MULTIRING_BOOL, MULTIRING_BOR, NULL, NULL);
    printf("bor: %d %d %d\n", truth[0], truth[1], truth[2]);

    if (count > 2) { /* each rank ends as it hears that rank 1 sums more numbers than the others */
        double more[7] = {0};
        if (strcmp(arguments[2], "callback") == 0) {
            multiring_all_reduce(more, rank == 1 ? 7 : 6, MULTIRING_FLOAT64, MULTIRING_SUM, end, NULL);
            pause();
        }
        end(NULL, multiring_all_reduce(more, rank == 1 ? 7 : 6, MULTIRING_FLOAT64, MULTIRING_SUM, NULL, NULL), "");
        end(NULL, multiring_barrier(), "");
    }
    if (count > 1) { /* the highest rank dies */
        if (rank == size - 1) raise(SIGKILL);
        if (multiring_all_reduce(x, 3, MULTIRING_FLOAT64, MULTIRING_SUM, note, &outcome) == MULTIRING_OK) {
            sem_wait(&outcome.done);
            printf("lost: %d %s\n", outcome.code, outcome.error);
        }
        say("after", multiring_barrier());
    }
    say("shutdown", multiring_shutdown());
    say("late", multiring_barrier());
    printf("rank %d of %d\n", multiring_rank(), multiring_world_size());
    return 0;
}
