/* Multiring for programs that are not written in Python: init, all-reduce, broadcast, barrier.
 *
 *     cc program.c $(python3 -m multiring.embed) -o program
 *     multiring run -n 2 ./program
 *
 * Every function returns 0, or a code other than 0; multiring_error then has the text. All ranks make the same calls in
 * the same order. docs/c.md has the whole story.
 */
#ifndef MULTIRING_H
#define MULTIRING_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MULTIRING_OK = 0,
    MULTIRING_FAILED = 1,    /* the job failed in another way */
    MULTIRING_PEER_LOST = 2, /* a rank died, closed its connections, or went silent */
    MULTIRING_TIMEOUT = 3,   /* a collective did not complete in time */
    MULTIRING_MISMATCH = 4,  /* ranks called different collectives, or with different arguments */
    MULTIRING_RESOURCE = 5,  /* out of shared memory, descriptors or ports */
    MULTIRING_USAGE = 6      /* a wrong argument, or no multiring_init before */
};

typedef enum {
    MULTIRING_FLOAT32 = 0,
    MULTIRING_FLOAT64 = 1,
    MULTIRING_FLOAT16 = 2,
    MULTIRING_BFLOAT16 = 3,
    MULTIRING_INT8 = 4,
    MULTIRING_UINT8 = 5,
    MULTIRING_INT16 = 6,
    MULTIRING_INT32 = 7,
    MULTIRING_INT64 = 8,
    MULTIRING_BOOL = 9, /* a byte each: 0 is false, and all else true */
    MULTIRING_COMPLEX64 = 10,
    MULTIRING_COMPLEX128 = 11,
    MULTIRING_UINT16 = 12,
    MULTIRING_UINT32 = 13,
    MULTIRING_UINT64 = 14,
    MULTIRING_FLOAT8_E4M3FN = 15,
    MULTIRING_FLOAT8_E5M2 = 16,
    MULTIRING_FLOAT8_E4M3FNUZ = 17,
    MULTIRING_FLOAT8_E5M2FNUZ = 18
} multiring_dtype;

typedef enum {
    MULTIRING_SUM = 0,
    MULTIRING_AVG = 1, /* floating-point and complex numbers only */
    MULTIRING_MIN = 2, /* not of complex numbers, as all that follow */
    MULTIRING_MAX = 3,
    MULTIRING_PROD = 4,
    MULTIRING_BAND = 5, /* bits, of integers and bool only, as all that follow */
    MULTIRING_BOR = 6,
    MULTIRING_BXOR = 7
} multiring_op;

/* Called once, when the buffer is the caller's again, with 0 or the code and text of what went wrong. It runs in a
 * thread of the engine, which waits for it: it must be short, must not throw, and must not call functions of this
 * header. */
typedef void (*multiring_callback)(void* context, int code, const char* error);

/* Join the job that the environment describes (multiring run, torchrun, mpirun, srun); alone, be a world of one. Starts
 * Python in this process if it does not run yet. */
int multiring_init(void);

/* Leave the job. Calls in flight fail; a program that ends without this is a rank that the others lose. */
int multiring_shutdown(void);

/* Index of this process, and number of processes; -1 before multiring_init. */
int multiring_rank(void);
int multiring_world_size(void);

/* Combine `data` of all ranks in place, element by element; all end with the same bits. With `done` it returns at
 * once. */
int multiring_all_reduce(void* data, size_t count, multiring_dtype dtype, multiring_op op, multiring_callback done,
                         void* context);

/* Copy `data` of rank `root` to all others. With `done` it returns at once. */
int multiring_broadcast(void* data, size_t count, multiring_dtype dtype, int root, multiring_callback done,
                        void* context);

/* Return when every rank has called it. */
int multiring_barrier(void);

/* What went wrong in the last call of this thread that did not return 0. */
const char* multiring_error(void);

#ifdef __cplusplus
}
#endif

#endif
