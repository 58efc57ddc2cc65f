// Prints the instruction sets that this machine can run, for CMake.
#include <cstdio>

#include "../cpu.cc"

int main() { std::puts(instruction_sets()); }
