// Decoding and verification of chunks on a GPU. kernels.ptx is compiled from this file by `make kernels`.
//
// The chunks of one copy are jobs. Raw ones lie at their targets already; the others are decoded from their frames (format.md, "Byte
// planes"). Every job is hashed at its target, and counted in `mismatches` unless the hash is its id. Frames are untrusted: whatever they
// say, a kernel reads only the job's frame and memory, and writes only to its target and memory. Damage that harms nothing else is left
// to the hash.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE static __attribute__((device, always_inline)) inline
#define SHARED static __attribute__((shared))

#define THREAD __nvvm_read_ptx_sreg_tid_x()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
#define BLOCK_X __nvvm_read_ptx_sreg_ctaid_x()
#define BLOCK_Y __nvvm_read_ptx_sreg_ctaid_y()
#define BLOCKS_X __nvvm_read_ptx_sreg_nctaid_x()
#define barrier() __syncthreads()

// Encodings of a plane.
#define RAW 0
#define ONE 1
#define HUFFMAN 2

// As `Job` in job.rs.
struct Job {
  u64 frame;    // address of the frame; not used for a raw chunk
  u64 target;   // address of the plain bytes
  u64 planes;   // address of memory for decoded planes: `4 * stride` bytes for each that is coded
  u64 values;   // address of memory for chaining values: 32 bytes for each started KiB, and for half as many more
  u32 len;      // plain bytes, at least one
  u32 width;    // bytes in a number; 0 for a raw chunk
  u32 rotated;  // 1 if numbers were rotated left by one bit
  u32 rest;     // first byte after the planes, in the frame
  u32 how[8];   // encoding of each plane
  u32 start[8]; // first byte of each plane in the frame
  u32 end[8];   // and the byte after its last one
  u32 id[8];    // BLAKE3 hash of the plain bytes
};

// ---- Huffman codes (src/codec/huffman): four streams of canonical codes of at most 11 bits ----

#define BITS_MAX 11
#define WINDOWS (1 << BITS_MAX)
#define LENGTHS 128
#define HEADER 140
#define STREAMS 4
#define SYMBOLS 4

DEVICE u32 part_of(const Job *job) { return (job->len / job->width + STREAMS - 1) / STREAMS; }

// Bytes between two decoded streams: words are written, up to eight symbols too many.
DEVICE u32 stride_of(const Job *job) { return (part_of(job) + 16 + 15) & ~15u; }

// Number of planes before `plane` that are coded.
DEVICE u32 coded_before(const Job *job, u32 plane) {
  u32 coded = 0;
  for (u32 other = 0; other < plane; other++) coded += job->how[other] == HUFFMAN;
  return coded;
}

DEVICE u32 little_endian(const u8 *at) { return at[0] | at[1] << 8 | at[2] << 16 | (u32)at[3] << 24; }

// Next bits of a stream, read in aligned words; zeros after the end.
struct Bits {
  const u32 *next;
  const u32 *end;
  u32 ahead;
  u64 bits;
  u32 count;
};

DEVICE u32 next_word(Bits *from) { return from->next < from->end ? *from->next++ : 0; }

DEVICE void refill(Bits *from) {
  if (from->count >= 32) return;
  from->bits |= (u64)from->ahead << from->count;
  from->count += 32;
  from->ahead = next_word(from);
}

DEVICE Bits bits_of(const u8 *start, const u8 *end) {
  Bits from;
  from.next = (const u32 *)((u64)start & ~3ull);
  from.end = (const u32 *)(((u64)end + 3) & ~3ull);
  u32 skipped = 8 * (u32)((u64)start & 3);
  from.bits = (u64)next_word(&from) >> skipped;
  from.count = 32 - skipped;
  from.ahead = next_word(&from);
  refill(&from);
  return from;
}

// Decodes one stream to `count` bytes at `out`, in words.
DEVICE void decode_stream(const u64 *table, const u8 *start, const u8 *end, u32 *out, u32 count) {
  Bits from = bits_of(start, end);
  u64 ready = 0;
  u32 symbols = 0, written = 0;
  while (written + symbols < count) {
    refill(&from);
#pragma unroll
    for (int twice = 0; twice < 2; twice++) {
      u64 entry = table[from.bits % WINDOWS];
      u32 used = (u32)(entry >> 32) & 255;
      from.bits >>= used;
      from.count -= used;
      ready |= (u64)(u32)entry << (8 * symbols);
      symbols += (u32)(entry >> 40);
      if (symbols >= 4) {
        *out++ = (u32)ready;
        ready >>= 32;
        symbols -= 4;
        written += 4;
      }
    }
  }
  *out = (u32)ready;
}

// Decodes the coded planes. Blocks of one warp: (job, plane).
KERNEL unpack(const Job *jobs, u32 *mismatches) {
  SHARED u16 single[WINDOWS];
  SHARED u64 table[WINDOWS];
  SHARED u16 codes[256];
  SHARED u8 lengths[256];
  SHARED u32 complete;
  const Job *job = jobs + BLOCK_X;
  const u32 plane = BLOCK_Y, lane = THREAD;
  if (plane >= job->width || job->how[plane] != HUFFMAN) return;
  const u8 *body = (const u8 *)(job->frame + job->start[plane]);
  const u32 len = job->end[plane] - job->start[plane];
  if (len < HEADER) {
    if (lane == 0) __nvvm_atom_add_gen_i((int *)mismatches, 1);
    return;
  }
  for (u32 symbol = lane; symbol < 256; symbol += THREADS) {
    lengths[symbol] = body[symbol / 2] >> (4 * (symbol & 1)) & 15;
  }
  barrier();
  if (lane == 0) {
    u32 counts[BITS_MAX + 1], filled = 0, fits = 1;
#pragma unroll
    for (int length = 0; length <= BITS_MAX; length++) counts[length] = 0;
    for (u32 symbol = 0; symbol < 256; symbol++) {
      u32 length = lengths[symbol];
      fits &= length <= BITS_MAX;
      filled += length ? WINDOWS >> length : 0;
#pragma unroll
      for (int of = 1; of <= BITS_MAX; of++) counts[of] += length == of;
    }
    complete = fits && filled == WINDOWS;
    // The first code of each length follows the last one of the shorter length.
    u32 next[BITS_MAX + 1];
    next[0] = counts[0] = 0;
#pragma unroll
    for (int length = 1; length <= BITS_MAX; length++) next[length] = (next[length - 1] + counts[length - 1]) << 1;
    for (u32 symbol = 0; symbol < 256; symbol++) {
      u32 length = lengths[symbol], code = 0;
#pragma unroll
      for (int of = 1; of <= BITS_MAX; of++) {
        code = length == of ? next[of] : code;
        next[of] += length == of;
      }
      codes[symbol] = length ? __builtin_bitreverse32(code) >> (32 - length) : 0;
    }
  }
  barrier();
  if (!complete) {
    if (lane == 0) __nvvm_atom_add_gen_i((int *)mismatches, 1);
    return;
  }
  for (u32 symbol = lane; symbol < 256; symbol += THREADS) {
    u32 length = lengths[symbol];
    if (length == 0) continue;
    for (u32 window = codes[symbol]; window < WINDOWS; window += 1u << length) single[window] = symbol | length << 8;
  }
  barrier();
  // The complete codes of each window: their symbols, bits and number.
  for (u32 window = lane; window < WINDOWS; window += THREADS) {
    u32 symbols = 0, used = 0, count = 0;
    while (count < SYMBOLS) {
      u32 entry = single[window >> used], length = entry >> 8;
      if (used + length > BITS_MAX) break;
      symbols |= (entry & 255) << (8 * count);
      used += length;
      count++;
    }
    table[window] = symbols | (u64)used << 32 | (u64)count << 40;
  }
  barrier();
  if (lane >= STREAMS) return;
  const u8 *streams = body + HEADER;
  u32 start = lane ? little_endian(body + LENGTHS + 4 * (lane - 1)) : 0;
  u32 end = lane < STREAMS - 1 ? little_endian(body + LENGTHS + 4 * lane) : len - HEADER;
  if (start > end || end > len - HEADER) {
    __nvvm_atom_add_gen_i((int *)mismatches, 1);
    return;
  }
  u32 numbers = job->len / job->width, part = part_of(job), before = lane * part;
  u32 count = before < numbers ? (numbers - before < part ? numbers - before : part) : 0;
  u8 *out = (u8 *)job->planes + (u64)(STREAMS * coded_before(job, plane) + lane) * stride_of(job);
  decode_stream(table, streams + start, streams + end, (u32 *)out, count);
}

// ---- Numbers from planes ----

template <u32 WIDTH> DEVICE void merge_numbers(const Job *job) {
  const u8 *frame = (const u8 *)job->frame;
  u8 *target = (u8 *)job->target;
  const u32 numbers = job->len / WIDTH, part = part_of(job), stride = stride_of(job);
  const u8 *from[WIDTH];
  u32 step[WIDTH], gap[WIDTH], coded = 0;
#pragma unroll
  for (u32 plane = 0; plane < WIDTH; plane++) {
    bool is_coded = job->how[plane] == HUFFMAN;
    from[plane] = is_coded ? (const u8 *)job->planes + (u64)(STREAMS * coded) * stride : frame + job->start[plane];
    step[plane] = job->how[plane] == ONE ? 0 : 1;
    gap[plane] = is_coded ? stride - part : 0;
    coded += is_coded;
  }
  const bool is_aligned = job->target % WIDTH == 0;
  for (u32 at = BLOCK_X * THREADS + THREAD; at < numbers; at += BLOCKS_X * THREADS) {
    const u32 stream = (at >= part) + (at >= 2 * part) + (at >= 3 * part);
    u64 number = 0;
#pragma unroll
    for (u32 plane = 0; plane < WIDTH; plane++) {
      number |= (u64)from[plane][at * step[plane] + stream * gap[plane]] << (8 * plane);
    }
    if (job->rotated) number = number >> 1 | (number & 1) << (8 * WIDTH - 1);
    if (WIDTH == 2 && is_aligned) {
      ((u16 *)target)[at] = (u16)number;
    } else if (WIDTH == 4 && is_aligned) {
      ((u32 *)target)[at] = (u32)number;
    } else if (WIDTH == 8 && is_aligned) {
      ((u64 *)target)[at] = number;
    } else {
#pragma unroll
      for (u32 byte = 0; byte < WIDTH; byte++) target[(u64)at * WIDTH + byte] = (u8)(number >> (8 * byte));
    }
  }
  const u32 whole = numbers * WIDTH;
  if (BLOCK_X == 0 && THREAD < job->len - whole) target[whole + THREAD] = frame[job->rest + THREAD];
}

// Writes numbers from their planes. Blocks: (any, job).
KERNEL merge(const Job *jobs) {
  const Job *job = jobs + BLOCK_Y;
  switch (job->width) {
  case 1: return merge_numbers<1>(job);
  case 2: return merge_numbers<2>(job);
  case 4: return merge_numbers<4>(job);
  case 8: return merge_numbers<8>(job);
  }
}

// ---- BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) ----

#define LEAF 1024
#define CHUNK_START 1
#define CHUNK_END 2
#define PARENT 4
#define ROOT 8

struct Words {
  u32 at[8];
};

DEVICE u32 rotate(u32 word, u32 by) { return word >> by | word << (32 - by); }

#define MIX(a, b, c, d, x, y)                                                                                          \
  a += b + x;                                                                                                          \
  d = rotate(d ^ a, 16);                                                                                               \
  c += d;                                                                                                              \
  b = rotate(b ^ c, 12);                                                                                               \
  a += b + y;                                                                                                          \
  d = rotate(d ^ a, 8);                                                                                                \
  c += d;                                                                                                              \
  b = rotate(b ^ c, 7);

// Compresses a block into `value`.
DEVICE void compress(Words *value, const u32 *block, u64 counter, u32 len, u32 flags) {
  u32 m[16], v[16];
#pragma unroll
  for (int i = 0; i < 16; i++) m[i] = block[i];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = value->at[i];
  v[8] = 0x6A09E667, v[9] = 0xBB67AE85, v[10] = 0x3C6EF372, v[11] = 0xA54FF53A;
  v[12] = (u32)counter, v[13] = (u32)(counter >> 32), v[14] = len, v[15] = flags;
#pragma unroll
  for (int round = 0; round < 7; round++) {
    MIX(v[0], v[4], v[8], v[12], m[0], m[1])
    MIX(v[1], v[5], v[9], v[13], m[2], m[3])
    MIX(v[2], v[6], v[10], v[14], m[4], m[5])
    MIX(v[3], v[7], v[11], v[15], m[6], m[7])
    MIX(v[0], v[5], v[10], v[15], m[8], m[9])
    MIX(v[1], v[6], v[11], v[12], m[10], m[11])
    MIX(v[2], v[7], v[8], v[13], m[12], m[13])
    MIX(v[3], v[4], v[9], v[14], m[14], m[15])
    const int order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    u32 permuted[16];
#pragma unroll
    for (int i = 0; i < 16; i++) permuted[i] = m[order[i]];
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = permuted[i];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) value->at[i] = v[i] ^ v[i + 8];
}

DEVICE void set_key(Words *value) {
  const u32 iv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
#pragma unroll
  for (int i = 0; i < 8; i++) value->at[i] = iv[i];
}

// Hashes each KiB of the plain bytes to a chaining value. Blocks: (KiBs, job).
KERNEL leaves(const Job *jobs) {
  const Job *job = jobs + BLOCK_Y;
  const u32 leaf = BLOCK_X * THREADS + THREAD;
  if (leaf >= (job->len + LEAF - 1) / LEAF) return;
  const u64 start = job->target + (u64)leaf * LEAF;
  const u32 left = job->len - leaf * LEAF, len = left < LEAF ? left : LEAF;
  const u32 only = job->len <= LEAF ? ROOT : 0;
  // Targets may begin and end at any byte; words are read aligned, the bytes after the last whole one by themselves.
  const u32 *words = (const u32 *)(start & ~3ull);
  const u32 shift = 8 * (u32)(start & 3);
  const u32 whole = ((u32)(start & 3) + len) / 4;
  u32 tail = 0;
  for (u32 byte = 0; byte < (((u32)(start & 3) + len) & 3); byte++) {
    tail |= (u32)((const u8 *)(words + whole))[byte] << (8 * byte);
  }
  Words value;
  set_key(&value);
  u32 low = whole > 0 ? words[0] : tail;
  const u32 blocks = (len + 63) / 64;
  for (u32 block = 0; block < blocks; block++) {
    u32 message[16];
    const u32 here = len - 64 * block < 64 ? len - 64 * block : 64;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
      const u32 next = 16 * block + i + 1;
      const u32 high = next < whole ? words[next] : next == whole ? tail : 0;
      u32 word = (u32)(((u64)high << 32 | low) >> shift);
      low = high;
      // Bytes after the end are zeros.
      if (here < 4 * i + 4) word = here <= 4 * i ? 0 : word & (0xFFFFFFFFu >> (8 * (4 * i + 4 - here)));
      message[i] = word;
    }
    const u32 last = block + 1 == blocks ? CHUNK_END | only : 0;
    compress(&value, message, leaf, here, (block == 0 ? CHUNK_START : 0) | last);
  }
  u32 *out = (u32 *)job->values + 8 * leaf;
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = value.at[i];
}

// Hashes the chaining values of each job pairwise until one is left, and compares it with the id. Blocks: job.
KERNEL roots(const Job *jobs, u32 *mismatches) {
  const Job *job = jobs + BLOCK_X;
  u32 count = (job->len + LEAF - 1) / LEAF;
  u32 *from = (u32 *)job->values, *to = from + 8 * count;
  while (count > 1) {
    const u32 pairs = count / 2, flags = count == 2 ? PARENT | ROOT : PARENT;
    for (u32 pair = THREAD; pair < pairs; pair += THREADS) {
      u32 message[16];
#pragma unroll
      for (int i = 0; i < 16; i++) message[i] = from[16 * pair + i];
      Words value;
      set_key(&value);
      compress(&value, message, 0, 64, flags);
#pragma unroll
      for (int i = 0; i < 8; i++) to[8 * pair + i] = value.at[i];
    }
    // The last one of an odd number moves up as it is.
    if (count % 2 && THREAD < 8) to[8 * pairs + THREAD] = from[8 * (count - 1) + THREAD];
    barrier();
    u32 *spare = from;
    from = to, to = spare;
    count = pairs + count % 2;
  }
  if (THREAD != 0) return;
  u32 differs = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) differs |= from[i] ^ job->id[i];
  if (differs) __nvvm_atom_add_gen_i((int *)mismatches, 1);
}
