/* zlib's crc32 by carry-less multiplication, in plain C: what `_checksum.c` hands addresses to. Knows nothing of Python, so
 * that it can be built and tested alone. `prepare` comes first; it says whether the processor has the instruction. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define POLYNOMIAL 0x04C11DB7u /* without its highest term, x^32 */
#define LINE 64
#define PAIRS_FROM 512 /* bytes; below, twice the lanes to join take longer than they save */

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define HAVE_FOLDING 1
/* What is written and what is checked is one and the same: the compiler may not read it again. */
#define READ_ONCE(x) __asm__ volatile("" : "+x"(x))
#endif

static uint32_t table[256];

static uint32_t reversed(uint32_t bits)
{
    uint32_t result = 0;
    for (int place = 0; place < 32; place++)
        result |= ((bits >> place) & 1u) << (31 - place);
    return result;
}

static void fill_table(void)
{
    const uint32_t polynomial = reversed(POLYNOMIAL);
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; bit++)
            rest = (rest >> 1) ^ (rest & 1 ? polynomial : 0);
        table[byte] = rest;
    }
}

static uint32_t by_table(uint32_t rest, const unsigned char *data, size_t size)
{
    for (size_t place = 0; place < size; place++)
        rest = (rest >> 8) ^ table[(rest ^ data[place]) & 0xFF];
    return rest;
}

#ifdef HAVE_FOLDING

/* x^power modulo the polynomial, its bits in the order in which bytes are read: lowest first, and, since a product of
 * such reversed factors comes out one place too low, shifted up by one. */
static uint64_t multiplier(int power)
{
    uint32_t rest = 1;
    for (int step = 0; step < power; step++)
        rest = (rest << 1) ^ (rest >> 31 ? POLYNOMIAL : 0);
    return (uint64_t)reversed(rest) << 1;
}

static uint64_t ahead_1024[2], ahead_512[2], ahead_128[2];
static int two_lanes_at_once;

static void fill_multipliers(void)
{
    ahead_1024[0] = multiplier(1024 + 32);
    ahead_1024[1] = multiplier(1024 - 32);
    ahead_512[0] = multiplier(512 + 32);
    ahead_512[1] = multiplier(512 - 32);
    ahead_128[0] = multiplier(128 + 32);
    ahead_128[1] = multiplier(128 - 32);
}

__attribute__((target("pclmul,sse2"))) static inline __m128i fold(__m128i lane, __m128i ahead, __m128i next)
{
    const __m128i low = _mm_clmulepi64_si128(lane, ahead, 0x00);
    const __m128i high = _mm_clmulepi64_si128(lane, ahead, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse2"))) static uint32_t join(const __m128i *lanes, int count, const unsigned char *data,
                                                             size_t size, unsigned char *target)
{
    if (target) {
        memcpy(target, data, size);
        data = target; /* the source may change meanwhile; what is checked is the copy */
    }
    const __m128i near = _mm_loadu_si128((const __m128i *)ahead_128);
    __m128i all = lanes[0];
    for (int lane = 1; lane < count; lane++)
        all = fold(all, near, lanes[lane]);
    unsigned char left[16];
    _mm_storeu_si128((__m128i *)left, all);
    return by_table(by_table(0, left, 16), data, size);
}

/* At least 64 bytes; copied to `target`, which begins a line, unless it is NULL. */
__attribute__((target("pclmul,sse2"))) static uint32_t by_folding(uint32_t rest, const unsigned char *data, size_t size,
                                                                   unsigned char *target)
{
    /* what was read so far is folded into the first bytes; ahead of them there is nothing */
    __m128i lanes[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    __m128i before = _mm_cvtsi32_si128((int)rest);
    const __m128i far = _mm_loadu_si128((const __m128i *)ahead_512);
    for (; size >= 64; data += 64, size -= 64) {
        for (int lane = 0; lane < 4; lane++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(data + 16 * lane));
            READ_ONCE(next);
            if (target)
                _mm_stream_si128((__m128i *)(target + 16 * lane), next);
            lanes[lane] = fold(lanes[lane], far, next);
        }
        lanes[0] = _mm_xor_si128(lanes[0], before);
        before = _mm_setzero_si128();
        if (target)
            target += 64;
    }
    return join(lanes, 4, data, size, target);
}

/* At least 128 bytes; copied to `target`, which begins a line, unless it is NULL. */
__attribute__((target("avx2,pclmul,vpclmulqdq"))) static uint32_t
by_folding_pairs(uint32_t rest, const unsigned char *data, size_t size, unsigned char *target)
{
    __m256i pairs[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i before = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)rest));
    const __m256i far = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)ahead_1024));
    for (; size >= 128; data += 128, size -= 128) {
        for (int pair = 0; pair < 4; pair++) {
            __m256i next = _mm256_loadu_si256((const __m256i *)(data + 32 * pair));
            READ_ONCE(next);
            if (target)
                _mm256_stream_si256((__m256i *)(target + 32 * pair), next);
            const __m256i low = _mm256_clmulepi64_epi128(pairs[pair], far, 0x00);
            const __m256i high = _mm256_clmulepi64_epi128(pairs[pair], far, 0x11);
            pairs[pair] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
        }
        pairs[0] = _mm256_xor_si256(pairs[0], before);
        before = _mm256_setzero_si256();
        if (target)
            target += 128;
    }
    __m128i lanes[8];
    for (int pair = 0; pair < 4; pair++)
        _mm256_storeu_si256((__m256i *)(lanes + 2 * pair), pairs[pair]);
    return join(lanes, 8, data, size, target);
}

#endif

static uint32_t folded(uint32_t rest, const unsigned char *data, size_t size, unsigned char *target)
{
#ifdef HAVE_FOLDING
    if (size >= PAIRS_FROM && two_lanes_at_once)
        return by_folding_pairs(rest, data, size, target);
    if (size >= 64)
        return by_folding(rest, data, size, target);
#endif
    if (target) {
        memcpy(target, data, size);
        data = target;
    }
    return by_table(rest, data, size);
}

static uint32_t crc32_of(uint32_t value, const unsigned char *data, size_t size)
{
    return ~folded(~value, data, size, NULL);
}

static uint32_t copy_of(unsigned char *target, const unsigned char *data, size_t size)
{
    /* Streaming stores want their target aligned; sources are read as they come. */
    size_t head = (size_t)(-(uintptr_t)target % LINE);
    if (head > size)
        head = size;
    memcpy(target, data, head);
    const uint32_t rest = folded(by_table(~0u, target, head), data + head, size - head, target + head);
#ifdef HAVE_FOLDING
    _mm_sfence(); /* streaming stores are seen by other threads in any order until this */
#endif
    return ~rest;
}

static int prepare(void)
{
#ifdef HAVE_FOLDING
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul")) {
        fill_table();
        fill_multipliers();
        two_lanes_at_once = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
        return 1;
    }
#endif
    return 0;
}
