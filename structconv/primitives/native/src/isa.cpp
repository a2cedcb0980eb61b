// Finds which of the compiled instruction sets this processor runs.
extern "C" __attribute__((visibility("default"))) int structconv_runs(int level) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return level == 0 || (level == 1 && avx2) || (level == 2 && avx512);
#else
    return level == 0;
#endif
}
