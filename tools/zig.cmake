# The compiler of portable wheels: Zig's clang, which links against the glibc that it is told of, whatever this machine has.
set(CMAKE_CXX_COMPILER "$ENV{ZIG_TOOLS}/c++")
set(CMAKE_AR "$ENV{ZIG_TOOLS}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$ENV{ZIG_TOOLS}/ranlib" CACHE FILEPATH "")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)  # needs clang-scan-deps, which Zig lacks
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h")  # nanobind prints to stderr, which Zig's C++ headers do not declare by the way
