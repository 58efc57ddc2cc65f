#include "check.h"

#include "../sampling.h"

namespace {

Report report;

constexpr int64_t V = 70, VALUES = 5, FEATURES_OUT = 7, HEADS = 4, GROUPS = 2, PLACE = 512;

Instruction instruction(Operation operation, int64_t to, int64_t first) {
    Instruction i = {};
    i.operation = operation, i.to = to, i.first = first, i.scale = 1, i.epsilon = 1e-5f;
    i.second = i.third = i.gates = i.rates = i.reader = i.writer = i.divisor_q = i.divisor_k = -1;
    return i;
}

// A program with every operation, ending in a linear layer whose weights are 0, so that its logits are its
// bias.
struct Sample {
    int64_t width;
    Floats table = random_floats(V * 300, -1, 1), numbers = random_floats(4000, 0.1, 0.9), bias;
    std::vector<double> frequencies = std::vector<double>(200, 0.1);
    std::vector<uint8_t> tiles = std::vector<uint8_t>(4 * 1024 * 1024, 0);
    std::vector<int32_t> sums = std::vector<int32_t>(512, 0);
    std::vector<Instruction> program;
    int64_t state = 0;

    Instruction& add(Operation operation, int64_t to, int64_t first) {
        program.push_back(instruction(operation, to, first));
        Instruction& i = program.back();
        i.n = width, i.weights = numbers.data(), i.frequencies = frequencies.data();
        return i;
    }

    Sample(int64_t n, int32_t packing) : width(n), bias(random_floats(512, -1, 1)) {
        for (int32_t kind = 1; kind >= 0; --kind) {
            Instruction& embed = add(EMBED, 0, -1);
            embed.kind = kind, embed.weights = table.data();
        }
        add(ADD_POSITIONS, 0, -1).weights = table.data();
        add(ADD_SINUSOIDS, 0, -1);
        add(ANGLES, PLACE, -1).n = 2;
        Instruction& norm = add(NORMALIZE, 0, 0);
        norm.heads = 1, norm.kind = 1, norm.bias = numbers.data();
        linear(0, 2 * PLACE, packing, HEADS * FEATURES_OUT);
        linear(0, 3 * PLACE, packing, GROUPS * FEATURES_OUT);
        linear(0, 4 * PLACE, packing, GROUPS * VALUES);
        Instruction& rotate = add(ROTATE, 2 * PLACE, 2 * PLACE);
        rotate.heads = HEADS, rotate.features = FEATURES_OUT, rotate.n = 2, rotate.second = PLACE;
        Instruction& conv = add(CONVOLVE, 4 * PLACE, 4 * PLACE);
        conv.n = GROUPS * VALUES, conv.window = 4, conv.state = take(3 * conv.n);
        Instruction& average = add(AVERAGE, 5 * PLACE, 4 * PLACE);
        average.n = GROUPS * VALUES, average.second = 4 * PLACE, average.bias = numbers.data();
        average.state = take(3 * average.n);
        Instruction& scan = add(SCAN, 5 * PLACE, 4 * PLACE);
        scan.n = GROUPS * VALUES, scan.features = 3, scan.state = take(scan.features * scan.n);
        scan.second = 4 * PLACE, scan.third = 2 * PLACE, scan.reader = 3 * PLACE;
        for (int32_t kind = IDENTITY; kind <= EXPONENTIAL; ++kind) {
            Instruction& apply = add(APPLY, 5 * PLACE, 4 * PLACE);
            apply.kind = kind, apply.n = GROUPS * VALUES, apply.second = 4 * PLACE;
        }
        for (int32_t kind = EXP_OF_QUERIES; kind <= BY_POSITION; ++kind) {
            Instruction& features = add(FEATURES, 6 * PLACE, 4 * PLACE);
            features.kind = kind, features.heads = GROUPS, features.n = VALUES, features.features = 21,
            features.window = 2;
        }
        for (int64_t features : {9, 1}) {
            Instruction& by_head = add(LINEAR_BY_HEAD, 6 * PLACE, 4 * PLACE);
            by_head.heads = GROUPS, by_head.n = VALUES, by_head.features = features;
            by_head.bias = numbers.data();
        }
        for (int32_t kind = NO_GATES; kind <= GATE_OF_AVERAGE; ++kind) {
            Instruction& recur = over_heads(RECUR);
            recur.kind = kind, recur.gates = 5 * PLACE, recur.rates = kind % 2 ? -1 : 5 * PLACE;
            recur.divisor_q = kind ? 2 * PLACE : -1, recur.divisor_k = kind ? 3 * PLACE : -1;
            recur.epsilon = kind % 2 ? 0 : 1e-6f;
            recur.state = take(GROUPS * (FEATURES_OUT * (VALUES + 1) + 1));
        }
        Instruction& replace = over_heads(RECUR);
        replace.kind = GATE_PER_FEATURE, replace.gates = 3 * PLACE;
        replace.reader = 3 * PLACE, replace.writer = 2 * PLACE;
        replace.state = take(GROUPS * FEATURES_OUT * VALUES);
        Instruction& window = over_heads(ATTEND);
        window.window = 3, window.state = take(16 * GROUPS * (FEATURES_OUT + VALUES));
        over_heads(ATTEND);
        Instruction& scaled = add(SCALE_HEADS, 7 * PLACE, 4 * PLACE);
        scaled.heads = GROUPS, scaled.n = VALUES, scaled.second = 5 * PLACE;
        Instruction& sum = add(ADD, 7 * PLACE, 4 * PLACE);
        sum.second = 5 * PLACE, sum.n = GROUPS * VALUES;
        linear(0, 8 * PLACE, packing, V);
        Instruction& mixture = add(MIXTURE, 9 * PLACE, 2 * PLACE);
        mixture.heads = 3, mixture.n = V, mixture.second = 7 * PLACE;
    }

    int64_t take(int64_t size) { return (state += size) - size; }

    Instruction& over_heads(Operation operation) {
        Instruction& i = add(operation, 7 * PLACE, 2 * PLACE);
        i.second = 3 * PLACE, i.third = 4 * PLACE, i.heads = i.queries = HEADS, i.groups = i.keys = GROUPS;
        i.features = FEATURES_OUT, i.values = VALUES;
        return i;
    }

    void linear(int64_t from, int64_t to, int32_t packing, int64_t outputs) {
        add(LINEAR_LAYER, to, from).layer = {width,       outputs,     packing,    tiles.data(),
                                             bias.data(), bias.data(), sums.data()};
    }
};

void check_decode(int64_t width, int64_t rows, int32_t packing, int threads) {
    report.begin("decode width=%ld rows=%ld packing=%d threads=%d", (long)width, (long)rows, packing,
                 threads);
    Sample s(width, packing);
    const int64_t capacity = 48, cache = GROUPS * (FEATURES_OUT + VALUES), n = 3 * rows;
    std::vector<int64_t> position((size_t)rows), token, sequence, place;
    Floats state, keys, logits((size_t)(rows * V), NAN);
    for (int64_t i = 0; i < n; ++i)
        token.push_back(i % V), sequence.push_back(i % rows), place.push_back(i < 2 * rows ? -1 : i % rows);
    Program p = {};
    std::vector<SequenceState> sequences;
    p.instructions = (int64_t)s.program.size(), p.head = 2, p.width = 10 * PLACE, p.hidden = 0,
    p.hidden_width = width;
    p.logits = 8 * PLACE, p.vocabulary = V, p.widest = width, p.threads = threads;
    p.instruction = s.program.data(), p.positions = -1, p.steady = rows % 2;
    const Tokens tokens = {n, token.data(), sequence.data(), place.data(), logits.data()};
    Doubles expected;
    for (int64_t i = 0; i < rows * V; ++i) expected.push_back(s.bias[(size_t)(i % V)]);
    report.run([&] {
        position.assign((size_t)rows, 0), state.assign((size_t)(rows * s.state), 0);
        keys.assign((size_t)(rows * cache * capacity), 0);
        sequences.clear();
        for (int64_t i = 0; i < rows; ++i)
            sequences.push_back({position.data() + i, state.data() + i * s.state,
                                 keys.data() + i * cache * capacity, capacity});
        p.sequence = sequences.data();
        return EXPORTED(decode)(&p, &tokens);
    });
    report.compare("logits", logits, expected);
    // Draws more tokens; the logits stay the same.
    const int64_t limit = 9, most = 5, stop[] = {1, 2}, stop_end[] = {2};
    Floats told((size_t)(rows * most * V));
    std::vector<uint8_t> seen((size_t)(rows * V)), status;
    std::vector<int64_t> length, drawn;
    report.run([&] {
        position.assign((size_t)rows, 3), status.assign((size_t)rows, ACTIVE);
        length.assign((size_t)rows, 0), drawn.assign((size_t)(rows * limit), -1);
        std::vector<Row> all;
        for (int64_t i = 0; i < rows; ++i)
            all.push_back({{0.8, 0.9, 0.01, 1.1, 20},
                           7,
                           limit,
                           i % 2,
                           stop,
                           stop_end,
                           drawn.data() + i * limit,
                           i % 3 ? seen.data() + i * V : nullptr,
                           i % 2 ? nullptr : told.data() + i * most * V});
        const Continuation c = {rows, most, all.data(), logits.data(), length.data(), status.data()};
        return EXPORTED(decode_on)(&p, &c);
    });
    report.compare("logits after drawing", logits, expected);
    report.compare("logits of the first tokens", Floats(told.begin(), told.begin() + V),
                   Doubles(expected.begin(), expected.begin() + V));
    for (int64_t i = 0; i < rows * limit; ++i)
        if (i % limit < length[(size_t)(i / limit)] && (drawn[(size_t)i] < 0 || drawn[(size_t)i] >= V))
            report.fail("drew no token");
}

// The token that `draw` must return for `top_p`, by sorting all tokens.
int64_t expected_token(const Floats& logits, double p, double random) {
    const size_t n = logits.size();
    std::vector<size_t> order;
    for (size_t i = 0; i < n; ++i) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    const double most = logits[order[0]];
    double total = 0, before = 0, sum = 0;
    for (float x : logits) total += std::exp(x - most);
    Doubles kept(n, 0), until;
    for (size_t i = 0; i < n && before < p; ++i)
        before += kept[order[i]] = std::exp(logits[order[i]] - most) / total;
    for (double share : kept) until.push_back(sum += share);
    return std::upper_bound(until.begin(), until.end(), random * sum) - until.begin();
}

void check_top_p(const Floats& logits) {
    report.begin("top_p of %zu logits, the first %g", logits.size(), logits[0]);
    std::vector<unrolled::Candidate> candidates(logits.size());
    for (double p : {1e-9, 0.3, 0.9, 0.999, 1 - 0x1p-53})
        for (double random : {0.0, 0.123, 0.4567, 0.98765, 0.9999991}) {
            const int64_t token = unrolled::draw({1, p, 0, 1, INT64_MAX}, (int64_t)logits.size(),
                                                 logits.data(), nullptr, random, candidates.data());
            if (token != expected_token(logits, p, random)) report.fail("drew another token");
        }
}

}  // namespace

int main() {
    for (int64_t n : {1, 7, 300})
        for (float spread : {0.0f, 1.0f, 3.0f, 5.0f, 10.0f, 100.0f}) {
            check_top_p(random_floats(n, -spread, spread));
            Floats ties = random_floats(n, -spread, spread);
            for (float& x : ties) x = std::round(x);
            check_top_p(ties);
        }
    for (size_t n = 1; n < 60; ++n) {  // equal shares whose sum may round to less than `p`, and no others
        Floats few(60, -INFINITY);
        std::fill_n(few.end() - n, n, 0.0f);
        check_top_p(few);
    }
    for (int32_t packing : {FLOAT32_TILES, BFLOAT16_TILES, INT8_TILES, INT4_TILES})
        for (int64_t width : {1, 33, 64, 128, 200})
            for (int64_t rows : {1, 2, 7, 30})
                for (int threads : {1, 3}) check_decode(width, rows, packing, threads);
    report.fail_allocations = true;
    for (int threads : {1, 3}) check_decode(33, 2, INT8_TILES, threads);
    return report.end();
}
