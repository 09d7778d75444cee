// Combine of flat rows (mode ht) by bulk copies, where the device has them: a multiprocessor keeps as much under way as
// its shared memory holds, without a register or a lane's time spent on it.
//
// Of each kShares rows the expert's rank pushes push_share into its owner's return stage, each piece with a flag; the
// owner fetches the others from where they lie. All ranks meet before the first row is fetched and when the last is there.
#include "ncclep/sums.cuh"
#include "ncclep/tokens.cuh"

using namespace ncclep;

constexpr int kShares = 8;

struct Shared {
    u64* word;
    i64* first_of;      // [ranks], row here of that rank's slot 0
    i64* first_at;      // [ranks], row at that rank of this one's slot 0
    int* received;      // [ranks]
    Landing* landings;  // one for each buffer
    Vec* buffers;       // of a piece each: push_batch for each warp that sends, then take_slots for each that adds up
    int longest;        // vectors of a buffer
};

__device__ static int buffers_of_pushing(const TokenArgs& a) { return (int)(a.push_warps * a.push_batch); }

__device__ static int buffer_count(const TokenArgs& a) {
    return buffers_of_pushing(a) + (int)(a.take_warps * a.take_slots);
}

__device__ static Shared shared_of(const TokenArgs& a) {
    Shared s;
    s.buffers = reinterpret_cast<Vec*>(shared_bytes());
    s.longest = piece_of(a.row_vecs, (int)a.return_pieces, 0).end;
    s.landings = reinterpret_cast<Landing*>(s.buffers + (i64)buffer_count(a) * s.longest);
    s.word = reinterpret_cast<u64*>(s.landings + buffer_count(a));
    s.first_of = reinterpret_cast<i64*>(s.word + 1);
    s.first_at = s.first_of + a.ranks;
    s.received = reinterpret_cast<int*>(s.first_at + a.ranks);
    return s;
}

__device__ static bool is_pushed(const TokenArgs& a, int slot) { return slot % kShares < a.push_share; }

// How many of the first `rows` slots are pushed, and the slot of the n-th of them.
__device__ static int pushed_among(const TokenArgs& a, int rows) {
    const int rest = rows % kShares, share = (int)a.push_share;
    return rows / kShares * share + (rest < share ? rest : share);
}

__device__ static int pushed_slot(const TokenArgs& a, int n) {
    return n / (int)a.push_share * kShares + n % (int)a.push_share;
}

// One lane sends pieces to their owners, `push_batch` at a time; their flags follow when all of them are there.
__device__ static void push_rows(const TokenArgs& a, const Shared& s, u64 epoch) {
    const int pieces = (int)a.return_pieces, batch = (int)a.push_batch, grid = gridDim.x;
    const int stride = grid * (int)a.push_warps;
    Landing* landings = s.landings + warp_id() * batch;
    Vec* buffers = s.buffers + (i64)warp_id() * batch * s.longest;
    const Vec* returning = at<Vec>(a.heaps, a.rank, a.returning_at);
    u64 pushed = 0;
    int source = 0, first = 0, end = 0;  // items (a pushed row and a piece of it) of the batch that is on its way
    const auto announce = [&] {
        if (first == end) return;
        await_stores();
        fence_bulk();
        fence_system();
        for (int item = first; item < end; ++item) {
            const i64 row = return_row(a, epoch, a.rank, pushed_slot(a, item / pieces));
            store_word(at<u64>(a.heaps, source, a.return_flags_at) + row * pieces + item % pieces, epoch + 1);
        }
    };
    u32 turns = 0;  // a bit for each buffer: whether it has held an odd number of pieces
    int number = warp_id() * grid + blockIdx.x;
    for (int distance = 1; distance < a.ranks; ++distance) {
        const int target = (int)((a.rank + distance) % a.ranks);
        const int items = pushed_among(a, s.received[target]) * pieces, batches = (items + batch - 1) / batch;
        for (; number < batches; number += stride) {
            const int begin = number * batch, count = items - begin < batch ? items - begin : batch;
            await_stores_read();
            for (int i = 0; i < count; ++i) {
                const Piece part = piece_of(a.row_vecs, pieces, (begin + i) % pieces);
                const i64 row = s.first_of[target] + pushed_slot(a, (begin + i) / pieces);
                bulk_load(buffers + i * s.longest, returning + row * a.row_vecs + part.first, part.end - part.first,
                          landings + i);
            }
            announce();
            source = target, first = begin, end = begin + count;
            for (int i = 0; i < count; ++i) {
                const int piece = (begin + i) % pieces;
                const Piece part = piece_of(a.row_vecs, pieces, piece);
                const i64 row = return_row(a, epoch, a.rank, pushed_slot(a, (begin + i) / pieces));
                await_landing(landings + i, turns >> i & 1);
                turns ^= 1u << i;
                bulk_store(at<Vec>(a.heaps, target, a.return_rows_at) + row * a.row_vecs + part.first,
                           buffers + i * s.longest, part.end - part.first);
                end_stores();
                pushed += piece == 0;
            }
        }
        number -= batches;
    }
    announce();
    if (pushed) fetch_add(&a.combine_state->rows_pushed, pushed);
}

// What a warp that adds up has asked for and not yet taken. Items: a token and a piece of its rows.
struct Asked {
    u32 items, items_taken;
    u32 pieces, pieces_taken;
    u32 wanted;  // of lane n: the ranks of the item number n, modulo 32
};

// Asks for the pieces of one item, a lane for each rank; false when one does not come.
__device__ static bool ask(const TokenArgs& a, const Shared& s, u64 epoch, Landing* landings, Vec* buffers, int slot,
                           u32 wanted, int piece, Asked& asked, u64& fetched) {
    const int rank = lane_id();
    const Piece part = piece_of(a.row_vecs, (int)a.return_pieces, piece);
    const bool wants = slot >= 0, away = wants && rank != a.rank, arrives = away && is_pushed(a, slot);
    const i64 row = arrives ? return_row(a, epoch, rank, slot) : wants ? s.first_at[rank] + slot : 0;
    bool came = true;
    if (arrives) {
        const u64* flags = at<u64>(a.heaps, a.rank, a.return_flags_at);
        came = wait_for(flags + row * a.return_pieces + piece, epoch + 1, rank, waiting_of(a));
        fence_bulk();
    }
    if (__ballot_sync(kAllLanes, !came) != 0) return false;
    if (wants) {
        const Vec* rows = arrives ? at<Vec>(a.heaps, a.rank, a.return_rows_at) : at<Vec>(a.heaps, rank, a.returning_at);
        const u32 buffer = (asked.pieces + count_bits(wanted & ((1u << rank) - 1))) % (u32)a.take_slots;
        bulk_load(buffers + buffer * s.longest, rows + row * a.row_vecs + part.first, part.end - part.first,
                  landings + buffer);
    }
    if (away && !arrives && piece == 0) ++fetched;
    if (lane_id() == asked.items % 32) asked.wanted = wanted;
    asked.pieces += count_bits(wanted);
    ++asked.items;
    return true;
}

// A warp adds up pieces of tokens; while it does, those of the next ones come.
template <typename Element>
__device__ inline void take_rows(const TokenArgs& a, const Shared& s, u64 epoch, int taker) {
    const int pieces = (int)a.return_pieces, stride = (int)(gridDim.x * a.take_warps);
    const u32 slots = (u32)a.take_slots;
    const int first_buffer = buffers_of_pushing(a) + taker * (int)slots;
    Landing* landings = s.landings + first_buffer;
    Vec* buffers = s.buffers + (i64)first_buffer * s.longest;
    const auto slot_in = [&](int item) {
        return lane_id() < a.ranks ? a.slot_of[(i64)(item / pieces) * a.ranks + lane_id()] : -1;
    };
    int end = (int)(a.tokens * pieces), next = taker * (int)gridDim.x + blockIdx.x;
    int slot = next < end ? slot_in(next) : -1;
    Asked asked{};
    u64 fetched = 0;
    for (int item = next; item < end; item += stride) {
        while (next < end) {
            const u32 wanted = __ballot_sync(kAllLanes, slot >= 0);
            if (asked.pieces - asked.pieces_taken + count_bits(wanted) > slots) break;
            if (asked.items - asked.items_taken == 32) break;
            const int following = next + stride, its_slot = following < end ? slot_in(following) : -1;
            if (!ask(a, s, epoch, landings, buffers, slot, wanted, next % pieces, asked, fetched)) {
                end = next;  // What has been asked for still comes, and must, before the block may end.
                break;
            }
            next = following, slot = its_slot;
        }
        if (item >= end) break;
        const u32 wanted = __shfl_sync(kAllLanes, asked.wanted, (int)(asked.items_taken % 32));
        const float weight = weight_of_lane(a, item / pieces);
        const u32 past = asked.pieces_taken + count_bits(wanted);
        for (u32 n = asked.pieces_taken; n != past; ++n) await_landing(landings + n % slots, n / slots);
        const Piece part = piece_of(a.row_vecs, pieces, item % pieces);
        const int vecs = part.end - part.first;
        Vec* sum = a.combined + (i64)(item / pieces) * a.row_vecs + part.first;
        for (int base = 0; base < vecs; base += 32 * kAtOnce) {
            const int first = base + lane_id();
            float sums[kAtOnce][Element::kPerVec] = {};
            u32 n = asked.pieces_taken;
            for (u32 left = wanted; left; left &= left - 1, ++n) {
                const float factor = __shfl_sync(kAllLanes, weight, first_bit(left));
                const Vec* row = buffers + (n % slots) * s.longest;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (first + 32 * i < vecs) {
                        float values[Element::kPerVec];
                        Element::widen(row[first + 32 * i], values);
#pragma unroll
                        for (int j = 0; j < Element::kPerVec; ++j) sums[i][j] += factor * values[j];
                    }
            }
            store_sums<Element>(sum, first, vecs, sums);
        }
        __syncwarp();
        asked.pieces_taken = past;
        ++asked.items_taken;
    }
    if (fetched) fetch_add(&a.combine_state->rows_pushed, fetched);
}

// Shared memory: for each buffer a piece of a row and 16 bytes, then 8 + 20 × ranks bytes.
template <typename Element>
__device__ inline void combine_bulk(const TokenArgs& a) {
    await_previous();
    const Shared s = shared_of(a);
    const u64 epoch = *epoch_of_block(a.combine_state);
    if (blockIdx.x == 0) signal_all(a, a.return_headers_at, epoch);
    check_tokens(a);
    for (int i = threadIdx.x; i < buffer_count(a); i += blockDim.x) begin_landing(s.landings + i);
    if (threadIdx.x < a.ranks) {
        const u64 counts = a.layout_state->epoch - 1;
        i64 here = 0, there = 0;
        for (i64 source = 0; source < threadIdx.x; ++source) here += a.received[source];
        for (i64 source = 0; source < a.rank; ++source)
            there += known_count(a, source, a.most_experts + threadIdx.x, counts);
        s.received[threadIdx.x] = a.received[threadIdx.x];
        s.first_of[threadIdx.x] = here;
        s.first_at[threadIdx.x] = there;
    }
    const bool together = await_all(a, a.return_headers_at, epoch, s.word);
    fence_bulk();
    const int taker = warp_id() - (warps_per_block() - (int)a.take_warps);
    if (together && taker >= 0) take_rows<Element>(a, s, epoch, taker);
    if (together && taker < 0 && lane_id() == 0) push_rows(a, s, epoch);
    exchange_done(a.heaps, a.rank, a.ranks, a.return_done_flags_at, epoch, waiting_of(a), s.word);
    leave(a.combine_state, epoch);
}

extern "C" __global__ void __launch_bounds__(512, 1) combine_bulk_float32(const TokenArgs a) {
    combine_bulk<Float32>(a);
}
extern "C" __global__ void __launch_bounds__(512, 1) combine_bulk_float16(const TokenArgs a) {
    combine_bulk<Float16>(a);
}
extern "C" __global__ void __launch_bounds__(512, 1) combine_bulk_bfloat16(const TokenArgs a) {
    combine_bulk<BFloat16>(a);
}
NCCLEP_EXPORT(combine_bulk_float32)
NCCLEP_EXPORT(combine_bulk_float16)
NCCLEP_EXPORT(combine_bulk_bfloat16)
