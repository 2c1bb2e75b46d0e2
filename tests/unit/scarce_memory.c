// Preloaded: every third time that a message is sent or received, the system has no memory for it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>

static atomic_uint sent, received;

ssize_t sendmsg(int socket, const struct msghdr* message, int flags) {
    if (atomic_fetch_add(&sent, 1) % 3 == 1) {
        errno = ENOBUFS;
        return -1;
    }
    ssize_t (*real)(int, const struct msghdr*, int);
    *(void**)&real = dlsym(RTLD_NEXT, "sendmsg");
    return real(socket, message, flags);
}

ssize_t readv(int socket, const struct iovec* parts, int count) {
    if (atomic_fetch_add(&received, 1) % 3 == 1) {
        errno = ENOMEM;
        return -1;
    }
    ssize_t (*real)(int, const struct iovec*, int);
    *(void**)&real = dlsym(RTLD_NEXT, "readv");
    return real(socket, parts, count);
}
