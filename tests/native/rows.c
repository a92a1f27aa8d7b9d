/* The kernel of row norms alone, against sums in long double. */

#include "../../src/torchtap/reduce/_rows_kernel.h"

#include "numbers.h"

static void every_width(void)
{
    for (size_t width = 1; width < 3000; width = width * 3 / 2 + 1)
        for (size_t rows = 1; rows < 4; rows++) {
            const size_t n = rows * width;
            float *memory[OPERANDS];
            const char *given[OPERANDS];
            for (int k = 0; k < OPERANDS; k++) {
                const size_t size = k < BIAS ? n : width;
                memory[k] = malloc(size * sizeof(float));
                for (size_t i = 0; i < size; i++)
                    memory[k][i] = (float)normal();
                given[k] = (const char *)memory[k];
            }
            double found[MOST_NORMS] = {0};
            long double wanted[2] = {0, 0};
            sum_rows(FLOAT32, rows, width, given, found);
            for (size_t row = 0; row < rows; row++) {
                long double step = 0, bare = 0;
                for (size_t i = 0; i < width; i++) {
                    const long double x = memory[VALUE][row * width + i], y = memory[BETWEEN][row * width + i];
                    const long double v = x - memory[BIAS][i], w = v - (y - memory[START_BIAS][i]);
                    step += (x - y) * (x - y);
                    bare += w * w;
                }
                wanted[0] += sqrtl(step);
                wanted[1] += sqrtl(bare);
            }
            check(fabsl(found[0] - wanted[0]) <= 2e-6L * wanted[0], "step", (long)rows, (long)width);
            check(fabsl(found[4] - wanted[1]) <= 2e-6L * wanted[1], "bare", (long)rows, (long)width);
            for (int k = 0; k < OPERANDS; k++)
                free(memory[k]);
        }
}

int main(void)
{
    every_width();
    choose_instructions();
    every_width();
    return ended("rows");
}
