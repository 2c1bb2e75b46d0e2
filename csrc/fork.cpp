#include "fork.hpp"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace multiring {
namespace {

std::mutex mutex;
std::vector<Forked*> engines;

void before_fork() {
    mutex.lock();
    for (Forked* engine : engines) engine->lock_for_fork();
}

void after_fork_in_parent() {
    for (auto engine = engines.rbegin(); engine != engines.rend(); ++engine) (*engine)->unlock_after_fork();
    mutex.unlock();
}

void after_fork_in_child() {
    for (auto engine = engines.rbegin(); engine != engines.rend(); ++engine) {
        (*engine)->unlock_after_fork();
        (*engine)->disown();
    }
    engines.clear();
    mutex.unlock();
}

}  // namespace

void register_for_fork(Forked& engine) {
    static const int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    static_cast<void>(once);
    const std::lock_guard lock(mutex);
    engines.push_back(&engine);
}

void unregister_for_fork(Forked& engine) {
    const std::lock_guard lock(mutex);
    std::erase(engines, &engine);
}

}  // namespace multiring
