// Forked children: data loaders fork while collectives run. A child gets a copy of our memory but none of our threads,
// and must not keep the rank's connections open, write into its arena, or take a lock that a lost thread holds.
#pragma once

namespace multiring {

class Engine;

// Engines that live in this process. While fork() runs, their locks are held; in the child each is disowned.
void register_for_fork(Engine& engine);
void unregister_for_fork(Engine& engine);

}  // namespace multiring
