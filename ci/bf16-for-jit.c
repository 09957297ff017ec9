/* The conversion from float to bfloat16 that LLVM's code calls on x86-64 CPUs without instructions for it.
 * GCC 13's runtime library has it, that of Debian 12 does not.
 *
 * Rounds to nearest, ties to even; a NaN stays one. The x86-64 ABI returns a bfloat16 in the lowest 16 bits
 * of the register that returns a float. */
#include <stdint.h>
#include <string.h>

float __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits = (bits >> 16) | 0x40u;
    else
        bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    float half;
    memcpy(&half, &bits, sizeof half);
    return half;
}
