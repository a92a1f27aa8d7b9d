/* Numbers below the normal range, taken as they are: `torch.set_flush_denormal` tells the processor to take them for
 * zero, thread by thread, and what is measured must not depend on that. */

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>
#define FLUSHING 0x8040u /* results, operands */
typedef unsigned int FloatMode;

static FloatMode take_small_numbers(void)
{
    const FloatMode before = _mm_getcsr();
    if (before & FLUSHING)
        _mm_setcsr(before & ~FLUSHING);
    return before;
}

static void put_back(FloatMode before)
{
    if (before & FLUSHING)
        _mm_setcsr(before);
}
#elif defined(__aarch64__) && defined(__GNUC__)
#define FLUSHING (UINT64_C(1) << 24)
typedef uint64_t FloatMode;

static FloatMode take_small_numbers(void)
{
    FloatMode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before & FLUSHING)
        __asm__ volatile("msr fpcr, %0" : : "r"(before & ~FLUSHING));
    return before;
}

static void put_back(FloatMode before)
{
    if (before & FLUSHING)
        __asm__ volatile("msr fpcr, %0" : : "r"(before));
}
#else
typedef int FloatMode;

static FloatMode take_small_numbers(void)
{
    return 0;
}

static void put_back(FloatMode before)
{
    (void)before;
}
#endif
