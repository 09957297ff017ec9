// What the memory of this machine gives: the streams of a CPU optimizer step with an addition each
// instead of its arithmetic.
//
//     gcc -O3 -march=native -fopenmp stream.c -o stream && ./stream PARAMETERS THREADS
//
// As a shared library (-shared -fPIC) it gives peers.py one pass of `adam-mix` at a time.
//
// Prints one line per row, tab-separated: `row`, name, bytes per parameter, median seconds. Bytes are
// those the loop names; that a cache line is read before it is written is not counted.

#include <errno.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The same in peers.py and in our own benchmark.
enum { WARM_UPS = 2, RUNS = 9 };

typedef struct {
    float *master, *first, *second; // read and written
    uint16_t *gradient;             // bf16, read
    uint16_t *weight;               // bf16, written
} State;

// A kernel works on the parameters from `begin` up to `end`.
typedef void Kernel(const State *state, size_t begin, size_t end);

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Truncates: rounding would be arithmetic.
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

// Normal numbers everywhere, as in our own benchmark: denormals would slow additions down.
static void fill(const State *state, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
        state->master[i] = 0.01f;
        state->first[i] = 1e-3f;
        state->second[i] = 1e-6f;
        state->gradient[i] = to_bf16(1e-3f);
        state->weight[i] = 0;
    }
}

// Adam: three fp32 streams read and written, a bf16 gradient read, a bf16 weight written. 28 bytes.
static void adam_mix(const State *state, size_t begin, size_t end) {
    float *restrict p = state->master, *restrict m = state->first, *restrict v = state->second;
    const uint16_t *restrict g = state->gradient;
    uint16_t *restrict w = state->weight;
    for (size_t i = begin; i < end; i++) {
        float gradient = from_bf16(g[i]);
        m[i] += gradient;
        v[i] += gradient;
        p[i] += gradient;
        w[i] = to_bf16(p[i]);
    }
}

// Three fp32 streams read and written, nothing else. 24 bytes.
static void update_three(const State *state, size_t begin, size_t end) {
    float *restrict p = state->master, *restrict m = state->first, *restrict v = state->second;
    for (size_t i = begin; i < end; i++) {
        m[i] += 1;
        v[i] += 1;
        p[i] += 1;
    }
}

// One fp32 stream read and written. 8 bytes.
static void update_one(const State *state, size_t begin, size_t end) {
    float *restrict p = state->master;
    for (size_t i = begin; i < end; i++) p[i] += 1;
}

// STREAM's triad: two fp32 streams read, one written. 12 bytes.
static void triad(const State *state, size_t begin, size_t end) {
    float *restrict a = state->master;
    const float *restrict b = state->first, *restrict c = state->second;
    for (size_t i = begin; i < end; i++) a[i] = b[i] + 3 * c[i];
}

// Every thread has one contiguous part, the same in every kernel, so that on a machine with several
// memory nodes it reads what it wrote first. Parts begin at whole cache lines.
static void on_all_threads(Kernel *kernel, const State *state, size_t parameters) {
    #pragma omp parallel
    {
        size_t threads = (size_t)omp_get_num_threads(), thread = (size_t)omp_get_thread_num();
        size_t lines = (parameters + 31) / 32; // 64 bytes of bf16
        size_t begin = lines * thread / threads * 32, end = lines * (thread + 1) / threads * 32;
        kernel(state, begin, end < parameters ? end : parameters);
    }
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *name, int bytes, Kernel *kernel, const State *state, size_t parameters) {
    double seconds[RUNS];
    for (int run = -WARM_UPS; run < RUNS; run++) {
        double start = omp_get_wtime();
        on_all_threads(kernel, state, parameters);
        if (run >= 0) seconds[run] = omp_get_wtime() - start;
    }
    qsort(seconds, RUNS, sizeof *seconds, ascending);
    printf("row\t%s\t%d\t%.9f\n", name, bytes, seconds[RUNS / 2]);
    fflush(stdout);
}

static void *allocate(size_t count, size_t size) {
    size_t bytes = (count * size + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return memory;
}

static size_t positive(const char *word) {
    char *end;
    errno = 0;
    long long number = strtoll(word, &end, 10);
    if (errno || *end || number < 1) {
        fprintf(stderr, "not a positive whole number: %s\n", word);
        exit(2);
    }
    return (size_t)number;
}

static State allocated(size_t parameters) {
    State state = {
        .master = allocate(parameters, sizeof(float)),
        .first = allocate(parameters, sizeof(float)),
        .second = allocate(parameters, sizeof(float)),
        .gradient = allocate(parameters, sizeof(uint16_t)),
        .weight = allocate(parameters, sizeof(uint16_t)),
    };
    on_all_threads(fill, &state, parameters);
    return state;
}

// Seconds of one pass over memory that is allocated by the first call.
double adam_mix_seconds(size_t parameters, int threads) {
    static State state;
    omp_set_num_threads(threads);
    if (!state.master) state = allocated(parameters);
    double start = omp_get_wtime();
    on_all_threads(adam_mix, &state, parameters);
    return omp_get_wtime() - start;
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: %s PARAMETERS THREADS\n", words[0]);
        return 2;
    }
    size_t parameters = positive(words[1]);
    omp_set_num_threads((int)positive(words[2]));

    State state = allocated(parameters);
    measure("stream adam-mix", 28, adam_mix, &state, parameters);
    measure("stream three fp32, read and written", 24, update_three, &state, parameters);
    measure("stream one fp32, read and written", 8, update_one, &state, parameters);
    measure("stream triad", 12, triad, &state, parameters);
    return 0;
}
