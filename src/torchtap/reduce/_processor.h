/* Which instructions the processor has. Asked for in the same words in which the kernels are built with them, so that
 * none is used that was not asked for. */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_CHOICE 1
#include <immintrin.h>
#if defined(__clang__)
#define WIDE_VECTORS ""
#else
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" WIDE_VECTORS)))

static int has_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif
