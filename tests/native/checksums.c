/* The checksum alone, against the table, and that a copy is what was checked. */

#include "../../src/torchtap/store/format/_checksum_kernel.h"

#include "numbers.h"

int main(void)
{
    if (!prepare()) {
        puts("checksums: this processor has no carry-less multiplication; zlib's are used");
        return 0;
    }
    for (size_t size = 0; size < 4000; size = size * 9 / 8 + 1)
        for (size_t start = 0; start < 70; start += 23) {
            unsigned char *data = malloc(size + start + 1), *copied = malloc(size + start + 1);
            for (size_t i = 0; i < size + start; i++)
                data[i] = (unsigned char)bits64();
            const uint32_t wanted = ~by_table(~0u, data + start, size);
            check(crc32_of(0, data + start, size) == wanted, "crc", (long)size, (long)start);
            check(copy_of(copied + start, data + start, size) == wanted, "copy's crc", (long)size, (long)start);
            check(memcmp(copied + start, data + start, size) == 0, "copy", (long)size, (long)start);
            free(data);
            free(copied);
        }
    return ended("checksums");
}
