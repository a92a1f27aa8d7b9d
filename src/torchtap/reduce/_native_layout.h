/* Tensors that do not lie in one piece: read as they lie where that is one piece after all, gathered block by block
 * where it is not. Included by _native.c. */

static void gather(char *to, const char *from, size_t n, ptrdiff_t stride, size_t bytes)
{
#define GATHER(type)                                                                                              \
    for (size_t i = 0; i < n; i++)                                                                                \
    ((type *)to)[i] = ((const type *)from)[(ptrdiff_t)i * stride]
    if (stride == 1)
        memcpy(to, from, n * bytes);
    else if (bytes == 1)
        GATHER(uint8_t);
    else if (bytes == 2)
        GATHER(uint16_t);
    else if (bytes == 4)
        GATHER(uint32_t);
    else
        GATHER(uint64_t);
#undef GATHER
}

/* Sizes and strides with every size above one, outermost first, and no two that could be one. */
typedef struct {
    int dimensions;
    size_t size[MOST_DIMENSIONS];
    ptrdiff_t stride[MOST_DIMENSIONS];
} Layout;

static void measure_gathered(int dtype, const char *raw, const Layout *layout, State *out)
{
    const size_t most = block_length(dtype), bytes = ITEM_BYTES[dtype];
    const int inner = layout->dimensions - 1;
    const size_t row = layout->size[inner];
    size_t at[MOST_DIMENSIONS] = {0};
    size_t filled = 0;
    double room[BLOCK / 2];
    const FloatMode mode = take_small_numbers();
    State one;
    *out = BLANK;
    for (;;) {
        for (size_t start = 0; start < row;) {
            const size_t space = most - filled, left = row - start, now = left < space ? left : space;
            const char *from = raw + (ptrdiff_t)start * layout->stride[inner] * (ptrdiff_t)bytes;
            start += now;
            if (filled == 0 && layout->stride[inner] == 1 && now >= BLOCK / 8) {
                block(dtype, from, now, &one, NULL); /* long rows need no gathering */
                merge(out, &one);
                continue;
            }
            gather((char *)room + filled * bytes, from, now, layout->stride[inner], bytes);
            filled += now;
            if (filled == most) {
                block(dtype, (const char *)room, filled, &one, NULL);
                merge(out, &one);
                filled = 0;
            }
        }
        int d = inner - 1;
        for (; d >= 0; d--) {
            raw += layout->stride[d] * (ptrdiff_t)bytes;
            if (++at[d] < layout->size[d])
                break;
            raw -= (ptrdiff_t)layout->size[d] * layout->stride[d] * (ptrdiff_t)bytes;
            at[d] = 0;
        }
        if (d < 0)
            break;
    }
    if (filled) {
        block(dtype, (const char *)room, filled, &one, NULL);
        merge(out, &one);
    }
    put_back(mode);
}

static void measure_layout(int dtype, const char *raw, Layout *layout, int threads, State *out)
{
    /* Outermost is what moves farthest; insertion sort, since there are few. */
    for (int i = 1; i < layout->dimensions; i++)
        for (int j = i; j > 0 && layout->stride[j - 1] < layout->stride[j]; j--) {
            const ptrdiff_t stride = layout->stride[j];
            const size_t size = layout->size[j];
            layout->stride[j] = layout->stride[j - 1];
            layout->size[j] = layout->size[j - 1];
            layout->stride[j - 1] = stride;
            layout->size[j - 1] = size;
        }
    int last = 0;
    for (int i = 1; i < layout->dimensions; i++) {
        if (layout->stride[last] == layout->stride[i] * (ptrdiff_t)layout->size[i]) {
            layout->size[last] *= layout->size[i];
            layout->stride[last] = layout->stride[i];
        } else {
            last++;
            layout->size[last] = layout->size[i];
            layout->stride[last] = layout->stride[i];
        }
    }
    layout->dimensions = last + 1;
    if (last == 0 && layout->stride[0] == 1)
        measure_contiguous(dtype, raw, layout->size[0], threads, out);
    else
        measure_gathered(dtype, raw, layout, out);
}
