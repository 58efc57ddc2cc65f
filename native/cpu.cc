// Which of the instruction sets that the kernels were compiled for this machine can run, best first.
extern "C" __attribute__((visibility("default"))) const char* instruction_sets() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
    return avx512 ? "avx512 avx2 baseline" : avx2 ? "avx2 baseline" : "baseline";
#elif defined(__aarch64__)
    return "neon";
#else
    return "baseline";
#endif
}
