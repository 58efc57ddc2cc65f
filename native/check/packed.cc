#include <cstring>

#include "check.h"

namespace {

Report report;

constexpr int64_t TILE = 64, GROUP = 32;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint16_t upper_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

float from_upper_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// A random matrix in tiles, as `packed.h` describes them, and its numbers. `largest` makes all of them as
// large as the form allows.
struct Matrix {
    int64_t inputs, outputs, padded = round_up(inputs, GROUP), rows = round_up(outputs, TILE);
    int32_t packing;
    bool largest;
    std::vector<uint8_t> tiles = std::vector<uint8_t>((size_t)(rows * padded * 4), 0);
    Floats scales = random_floats(rows, 0.5, 2), bias = random_floats(rows, -1, 1);
    std::vector<int32_t> sums = std::vector<int32_t>((size_t)rows, 0);
    Doubles numbers = Doubles((size_t)(outputs * inputs));

    Matrix(int64_t in, int64_t out, int32_t form, bool extreme)
        : inputs(in), outputs(out), packing(form), largest(extreme) {
        for (int64_t o = 0; o < outputs; ++o)
            for (int64_t i = 0; i < inputs; ++i)
                numbers[(size_t)(o * inputs + i)] = put(o, i, largest ? 1 : random_floats(1, -1, 1)[0]);
    }

    template <typename T>
    void write(int64_t byte, T x) {
        std::memcpy(tiles.data() + byte, &x, sizeof x);
    }

    // Writes the number nearest to x times the largest one of this form, and returns it.
    double put(int64_t o, int64_t i, float x) {
        const int64_t tile = o / TILE, lane = o % TILE;
        if (packing == FLOAT32_TILES) {
            write(4 * ((tile * padded + i) * TILE + lane), x);
            return x;
        }
        if (packing == BFLOAT16_TILES) {
            write(2 * (((tile * padded + i) / 2 * TILE + lane) * 2 + i % 2), upper_half(x));
            return from_upper_half(upper_half(x));
        }
        if (packing == INT8_TILES) {
            const int whole = (int)std::lrint(127 * x);
            write(((tile * padded + i) / 4 * TILE + lane) * 4 + i % 4, (int8_t)whole);
            sums[(size_t)o] += whole;
            return (double)whole * scales[(size_t)o];
        }
        const int64_t group = (tile * (padded / GROUP) + i / GROUP) * (2 * TILE + TILE * GROUP / 2),
                      k = i % GROUP;
        const int64_t byte = group + 2 * TILE + (k / 8 * TILE + lane) * 4 + k % 4;
        const int whole = (int)std::lrint(7 * x);
        const uint16_t scale = upper_half(scales[(size_t)o] + (float)(i / GROUP));
        write(group + 2 * lane, scale);
        tiles[(size_t)byte] = (uint8_t)(tiles[(size_t)byte] | (whole + 8) << (k % 8 < 4 ? 0 : 4));
        return (double)whole * from_upper_half(scale);
    }
};

// Rows of x that no form rounds: bfloat16 numbers, or whole ones, the first of each group the largest.
Floats whole_rows(int64_t rows, int64_t inputs, int32_t packing, bool largest) {
    const float most = packing == INT4_TILES ? 127 : 32767;
    Floats x = random_floats(rows * inputs, -1, 1);
    for (int64_t i = 0; i < rows * inputs; ++i) {
        float& value = x[(size_t)i];
        if (packing == BFLOAT16_TILES) value = from_upper_half(upper_half(value));
        if (packing == FLOAT32_TILES || packing == BFLOAT16_TILES) continue;
        const bool first = i % inputs % GROUP == 0;
        value = first || largest ? most : std::rint(value * most);
    }
    return x;
}

void check_product(int64_t rows, int64_t inputs, int64_t outputs, int32_t packing, bool largest,
                   int threads) {
    report.begin("product rows=%ld inputs=%ld outputs=%ld packing=%d largest=%d threads=%d", (long)rows,
                 (long)inputs, (long)outputs, packing, largest, threads);
    const Matrix w(inputs, outputs, packing, largest);
    const Floats x = whole_rows(rows, inputs, packing, largest);
    Doubles expected;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t o = 0; o < outputs; ++o) {
            double total = w.bias[(size_t)o];
            for (int64_t i = 0; i < inputs; ++i)
                total += (double)x[(size_t)(r * inputs + i)] * w.numbers[(size_t)(o * inputs + i)];
            expected.push_back(total);
        }
    // Row i of the table is token i.
    Instruction program[2] = {};
    program[0].operation = EMBED, program[0].n = inputs, program[0].weights = x.data();
    const int64_t place = round_up(inputs, TILE);
    program[1].operation = LINEAR_LAYER, program[1].to = place;
    program[1].layer = {inputs,          outputs,       packing,      w.tiles.data(),
                        w.scales.data(), w.bias.data(), w.sums.data()};
    std::vector<int64_t> token, zeros((size_t)rows, 0);
    for (int64_t r = 0; r < rows; ++r) token.push_back(r);
    int64_t position = 0;
    Program p = {};
    p.instructions = 2, p.head = 1, p.width = place + w.rows, p.hidden_width = inputs, p.logits = place;
    p.vocabulary = outputs, p.widest = inputs, p.threads = threads, p.instruction = program;
    const SequenceState sequence = {&position, nullptr, nullptr, 0};
    p.sequence = &sequence, p.positions = -1;
    Floats y((size_t)(rows * outputs), NAN);
    const Tokens tokens = {rows, token.data(), zeros.data(), token.data(), y.data()};
    report.run([&] { return EXPORTED(decode)(&p, &tokens); });
    report.compare("y", y, expected);
}

}  // namespace

int main() {
    for (int32_t packing : {FLOAT32_TILES, BFLOAT16_TILES, INT8_TILES, INT4_TILES}) {
        for (int64_t inputs : {1, 33, 64, 200})
            for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 16, 19, 70})
                check_product(rows, inputs, 100, packing, false, rows % 2 ? 1 : 3);
        for (int64_t rows : {1, 6, 17}) check_product(rows, 1100, 70, packing, true, 1);
    }
    return report.end();
}
