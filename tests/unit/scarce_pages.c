// Preloaded: shared memory has no more pages than PAGES_BYTES for all files of this process together.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

static long taken;

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    int (*real)(int, int, off_t, off_t);
    *(void**)&real = dlsym(RTLD_NEXT, "fallocate");
    const long more = mode & FALLOC_FL_PUNCH_HOLE ? -bytes : bytes;
    if (taken + more > atol(getenv("PAGES_BYTES"))) {
        errno = ENOSPC;
        return -1;
    }
    const int result = real(fd, mode, offset, bytes);
    if (result == 0) taken += more;
    return result;
}
