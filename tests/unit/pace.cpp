// Makes copies as a Pace says, for test_pace.py. The first argument is the rule, copies or small_copies; each three
// after it are a stretch: how many copies, and the bytes a nanosecond at which those left in the caches and those past
// them go. Every tenth copy that is timed takes a hundred times as long.
#include "pace.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

int main(int count, char** arguments) {
    using multiring::Pace;
    const bool is_small = count > 1 && std::strcmp(arguments[1], "small_copies") == 0;
    Pace pace(is_small ? Pace::small_copies : Pace::copies);
    const auto size = static_cast<double>(pace.fewest_bytes());
    int timed = 0;
    for (int i = 2; i + 2 < count; i += 3) {
        const int copies = std::atoi(arguments[i]);
        const double rates[] = {std::atof(arguments[i + 1]), std::atof(arguments[i + 2])};
        int streamed = 0;
        for (int copy = 0; copy < copies; ++copy) {
            const bool streams = pace.streams();
            streamed += streams;
            if (!pace.is_due()) continue;
            const double nanoseconds = size / rates[streams] * (++timed % 10 == 0 ? 100 : 1);
            pace.note(streams, pace.fewest_bytes(), std::chrono::nanoseconds(static_cast<long>(nanoseconds)));
        }
        std::printf("%d\n", streamed);
    }
}
