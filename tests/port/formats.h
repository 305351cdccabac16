/* SPEC.md 4: block formats, to the byte. */
#include <math.h>

enum { Q8_0, Q5_1, Q4_0, FP8 };
static const int BLOCK_BYTES[4] = {34, 24, 18, 32};
static const char *const FORMAT_NAMES[4] = {"q8_0", "q5_1", "q4_0", "fp8"};

/* x rounded half to even to a small float with `bits` of mantissa and lowest exponent `low`: its code, at most `most`,
 * with the `sign` bit; NaN has a code of its own. */
static unsigned code_of(float x, int bits, int low, unsigned most, unsigned sign, unsigned nan) {
    int e;
    if (isnan(x)) return nan;
    frexp(x, &e);
    e = x == 0 || e - 1 < low ? low : e - 1;
    double code = isinf(x) ? most : ldexp(e - low, bits) + rint(ldexp(fabs(x), bits - e));
    return (code > most ? most : (unsigned)code) | (signbit(x) ? sign : 0);
}

static float value_of(unsigned code, int bits, int low) {
    int e = (int)(code >> bits), m = (int)(code & ((1u << bits) - 1));
    return e ? ldexpf((float)(m + (1 << bits)), e - 1 + low - bits) : ldexpf((float)m, low - bits);
}

static unsigned f16(float x) {
    return code_of(x, 10, -14, 0x7C00, 0x8000, 0x7FFF);
}

static float from_f16(const uint8_t *b) {
    unsigned code = b[0] | (unsigned)b[1] << 8, magnitude = code & 0x7FFF;
    float x = magnitude < 0x7C00 ? value_of(magnitude, 10, -14) : magnitude == 0x7C00 ? INFINITY : NAN;
    return code & 0x8000 ? -x : x;
}

static void put_f16(uint8_t *b, float x) {
    b[0] = (uint8_t)f16(x), b[1] = (uint8_t)(f16(x) >> 8);
}

static int rounded(float y, int low, int high) {
    if (isnan(y)) return 0;
    y = rintf(y);
    return y < (float)low ? low : y > (float)high ? high : (int)y;
}

static void encode(int format, const float *x, uint8_t *out) {
    float low = NAN, high = NAN, most = NAN, d, id;
    int q[32], largest = 0;
    for (int j = 0; j < 32; j++) {
        if (isnan(x[j])) continue;
        if (isnan(low) || x[j] < low || (x[j] == low && signbit(x[j]))) low = x[j];
        if (isnan(high) || x[j] > high) high = x[j];
        if (isnan(most) || fabsf(x[j]) > most) most = fabsf(x[j]), largest = j;
    }
    d = format == Q8_0 ? most / 127 : format == Q5_1 ? (high - low) / 31 : x[largest] / -8;
    id = isinf(1 / d) ? 0 : 1 / d;
    if (format != FP8) put_f16(out, d);
    if (format == Q5_1) put_f16(out + 2, low), memset(out + 4, 0, 4);
    for (int j = 0; j < 32; j++) {
        float y = fmaf(x[j], id, 8.5f);
        if (format == FP8) out[j] = (uint8_t)code_of(x[j], 3, -6, 0x7E, 0x80, 0x7F);
        if (format == Q8_0) out[2 + j] = (uint8_t)rounded(x[j] * id, -127, 127);
        if (format == Q5_1) q[j] = rounded((x[j] - low) * id, 0, 31), out[4 + j / 8] |= (uint8_t)(q[j] >> 4 << j % 8);
        if (format == Q4_0) q[j] = isfinite(d) && d != 0 && id == 0 ? 8 : isnan(y) ? 0 : y > 15 ? 15 : (int)y;
    }
    for (int i = 0; i < 16 && (format == Q5_1 || format == Q4_0); i++)
        out[(format == Q5_1 ? 8 : 2) + i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
}

static void decode(int format, const uint8_t *in, float *x) {
    const uint8_t *n = in + (format == Q5_1 ? 8 : 2);
    for (int j = 0; j < 32; j++) {
        int q = n[j % 16] >> (j / 16 * 4) & 15;
        if (format == Q8_0) x[j] = (float)(int8_t)in[2 + j] * from_f16(in);
        if (format == Q5_1) x[j] = fmaf(from_f16(in), (float)(q | (in[4 + j / 8] >> j % 8 & 1) << 4), from_f16(in + 2));
        if (format == Q4_0) x[j] = (float)(q - 8) * from_f16(in);
        if (format == FP8) {
            x[j] = (in[j] & 0x7F) == 0x7F ? NAN : value_of(in[j] & 0x7F, 3, -6);
            if (in[j] & 0x80) x[j] = -x[j];
        }
    }
}
