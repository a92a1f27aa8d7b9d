/* What is known of numbers after one look at them, and how two such states become one.
 *
 * The mean is held in two parts and the spread as a deviation, not as a sum of squares. So means far larger than the
 * spread, numbers near the ends of the range and states that merge in any order cost no digits.
 */

/* The same fields in the same order as moments.FIELDS. `mean + rest` is the mean, to twice the digits. */
typedef struct {
    double count, nans, infs, zeros, mean, deviation, low, high, l1, rest;
} State;

static const State BLANK = {0, 0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0};

static double finite_in(const State *state)
{
    return state->count - state->nans - state->infs;
}

/* The mean as the sum of two numbers, of which the larger is rounded to; what rounding leaves out goes to `rest`. */
static void set_mean(State *state, double one, double other)
{
    const double sum = one + other;
    if (sum - sum == 0) {
        const double part = sum - one;
        state->rest = (one - (sum - part)) + (other - part);
    } else {
        state->rest = 0;
    }
    state->mean = sum;
}

/* Squares of these would vanish or overflow. */
static double merged_deviation(const State *left, const State *right, double keep, double share)
{
    const double half = (right->mean * 0.5 - left->mean * 0.5) + (right->rest * 0.5 - left->rest * 0.5);
    const double between = half * (2 * sqrt(keep * share));
    return hypot(hypot(sqrt(keep) * left->deviation, sqrt(share) * right->deviation), between);
}

/* By the formula of Chan, Golub and LeVeque. */
static void merge(State *into, const State *from)
{
    const double before = finite_in(into), more = finite_in(from);
    into->count += from->count;
    into->nans += from->nans;
    into->infs += from->infs;
    into->zeros += from->zeros;
    into->l1 += from->l1;
    if (more == 0)
        return;
    if (before == 0) {
        into->mean = from->mean;
        into->rest = from->rest;
        into->deviation = from->deviation;
        into->low = from->low;
        into->high = from->high;
        return;
    }
    const double share = more / (before + more), keep = before / (before + more);
    const double delta = (from->mean - into->mean) + (from->rest - into->rest);
    const double variance = keep * (into->deviation * into->deviation) + share * (from->deviation * from->deviation) +
                            keep * share * (delta * delta);
    if (variance > 1e-270 && variance < 1e300)
        into->deviation = sqrt(variance);
    else if (into->deviation != 0 || from->deviation != 0 || delta != 0)
        into->deviation = merged_deviation(into, from, keep, share);
    if (delta - delta == 0)
        set_mean(into, into->mean, into->rest + delta * share);
    else /* two means at opposite ends of the range: their distance overflows, their average does not */
        set_mean(into, into->mean * keep, from->mean * share);
    if (from->low < into->low)
        into->low = from->low;
    if (from->high > into->high)
        into->high = from->high;
}

#define STATISTICS 12

/* In the order of moments.STATISTICS. What has no meaning without finite values is NaN then. */
static void finish_state(const State *state, double *out)
{
    const double finite = finite_in(state), nothing = finite > 0 ? 0 : NAN;
    const double rms = hypot(state->deviation, state->mean) + nothing;
    out[0] = state->count;
    out[1] = state->mean + nothing;
    out[2] = finite > 1 ? state->deviation * sqrt(finite / (finite - 1)) : NAN;
    out[3] = state->low + nothing;
    out[4] = state->high + nothing;
    out[5] = (-state->low > state->high ? -state->low : state->high) + nothing;
    out[6] = state->l1;
    out[7] = finite > 0 ? rms * sqrt(finite) : 0;
    out[8] = rms;
    out[9] = state->zeros / state->count;
    out[10] = state->nans;
    out[11] = state->infs;
}

/* A center near `mean`, in steps of about the spread. Its low digits would be rounded away in the same
 * direction whenever it is taken from a larger number, and that would add up; so it has none. */
static double blunt(double mean, double spread)
{
    int exponent;
    if (!(spread > 0 && spread - spread == 0))
        return mean;
    if (fabs(mean) <= spread)
        return 0; /* near enough, and nothing need be subtracted */
    frexp(spread, &exponent);
    const double step = ldexp(1, exponent - 1), steps = mean / step;
    return fabs(steps) < 0x1p52 ? floor(steps + 0.5) * step : mean;
}

static double center_of(const State *state)
{
    return blunt(state->mean, state->deviation);
}

/* What a first look at a block finds: sums of distances from a center, of their squares and of magnitudes. `zeros` is
 * negative where it has not counted them: not every look can, and one that need not is the faster. */
typedef struct {
    double drift, squares, l1;
    float low, high, least;
    int zeros;
} Look;

typedef struct {
    double drift, squares, l1, low, high, least;
    int zeros;
} WideLook;
