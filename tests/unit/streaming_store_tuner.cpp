// Makes copies as a StreamingStoreTuner says, for test_streaming_store_tuner.py. The first argument is the rule, copies
// or small_copies; each three after it are a stretch: how many copies, and the bytes a nanosecond at which those left in
// the caches and those past them go. Every tenth copy that is timed takes a hundred times as long.
#include "streaming_store_tuner.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

int main(int count, char** arguments) {
    using multiring::StreamingStoreTuner;
    const bool is_small = count > 1 && std::strcmp(arguments[1], "small_copies") == 0;
    StreamingStoreTuner tuner(is_small ? StreamingStoreTuner::small_copies : StreamingStoreTuner::copies);
    const auto size = static_cast<double>(tuner.fewest_bytes());
    int timed = 0;
    for (int i = 2; i + 2 < count; i += 3) {
        const int copies = std::atoi(arguments[i]);
        const double rates[] = {std::atof(arguments[i + 1]), std::atof(arguments[i + 2])};
        int streamed = 0;
        for (int copy = 0; copy < copies; ++copy) {
            const bool streams = tuner.streams();
            streamed += streams;
            if (!tuner.is_due()) continue;
            const double nanoseconds = size / rates[streams] * (++timed % 10 == 0 ? 100 : 1);
            tuner.note(streams, tuner.fewest_bytes(), std::chrono::nanoseconds(static_cast<long>(nanoseconds)));
        }
        std::printf("%d\n", streamed);
    }
}
