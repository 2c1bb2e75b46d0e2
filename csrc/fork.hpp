// Forked children: data loaders fork while collectives run. A child gets a copy of our memory but none of our threads,
// and must not keep the rank's connections open, write into its arena, or take a lock that a lost thread holds.
#pragma once

namespace multiring {

// An engine, as fork() deals with it.
class Forked {
  public:
    virtual void lock_for_fork() = 0;
    virtual void unlock_after_fork() = 0;
    virtual void disown() noexcept = 0;

  protected:
    ~Forked() = default;
};

// Engines that live in this process. While fork() runs, their locks are held; in the child each is disowned.
void register_for_fork(Forked& engine);
void unregister_for_fork(Forked& engine);

}  // namespace multiring
